"""The operating system behind one seam: files, syncs, locks, free space."""
