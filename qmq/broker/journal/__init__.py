"""Records of the pull log: their types, when they are written, and replies that wait for the disk."""
