"""The files: knows bytes, positions and numpy; nothing of sockets, groups or time."""
