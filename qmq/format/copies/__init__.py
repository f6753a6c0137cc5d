"""Batches of copies of stored messages: fallen due, of one group alone, restored. Each keeps its original's id."""
