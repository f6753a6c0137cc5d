"""Failover of failed messages while their broker is lost: to another broker, or to files on this machine."""
