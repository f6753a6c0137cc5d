"""Looks for stored messages: one by its id, or all of a selection, at all brokers of a client."""
