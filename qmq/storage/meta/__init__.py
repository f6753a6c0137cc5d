"""The data about a data directory: identity, subjects, gaps, checkpoints."""
