"""Sends: check, tell repeats apart, store, show, answer."""
