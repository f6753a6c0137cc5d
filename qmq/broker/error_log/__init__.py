"""Retries and dead letters: messages that a consumer failed to handle."""
