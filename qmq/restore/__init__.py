"""Restoring: messages of an archive back into a broker. Above history, which reads, and net, which sends."""
