"""Messages that are handed over from another broker, or restored from an archive."""
