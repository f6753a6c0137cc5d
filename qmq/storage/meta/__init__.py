"""What a data directory says of itself: identity, subjects, gaps, checkpoints."""
