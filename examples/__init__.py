"""Programs that use QMQ, and the real orders that they send."""
