"""Sending: messages gather into batches that wait for their answers."""
