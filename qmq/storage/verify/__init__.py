"""Checking a data directory, repairing it, and the scrub of a running broker."""
