"""The send path: check batches, recognise repeats, store, publish, answer."""
