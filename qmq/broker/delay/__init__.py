"""Messages that are delivered at a later time."""
