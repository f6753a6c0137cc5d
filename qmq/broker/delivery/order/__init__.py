"""The delivery of messages with order keys."""
