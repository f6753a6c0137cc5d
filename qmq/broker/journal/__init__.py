"""The pull log as the rules use it: kinds of records, when they are written, and replies that wait for the disk."""
