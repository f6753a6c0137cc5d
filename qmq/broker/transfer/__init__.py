"""Messages from elsewhere: handed over by other brokers, restored from archives."""
