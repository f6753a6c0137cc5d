"""TLS of clients: contexts made of files, and errors in words. Imported at the first connection by TLS only."""
