"""Brokers: how each is installed, started on loopback, and stopped. One file a broker."""
