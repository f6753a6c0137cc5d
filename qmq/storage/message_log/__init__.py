"""The message log: segments of batches, their sparse indexes, and reading them."""
