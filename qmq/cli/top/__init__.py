"""``qmq top``: what goes on at the brokers, on a terminal."""
