"""Opening a data directory: decide what to do, then do it."""
