"""Messages that are delivered later."""
