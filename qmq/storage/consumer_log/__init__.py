"""The consumer log: rows that point into the message log, found by position, time and subject."""
