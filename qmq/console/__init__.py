"""``qmq console``: pages, JSON, metrics and events about brokers, made by a client in a process of its own."""
