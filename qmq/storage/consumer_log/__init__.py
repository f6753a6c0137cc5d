"""The consumer log: rows that point into the message log, by position and by subject."""
