"""The key index: finds the batches whose messages have a key, or an id from elsewhere, by its hash."""
