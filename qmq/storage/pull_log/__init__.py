"""The pull log: a journal of everything that befalls groups."""
