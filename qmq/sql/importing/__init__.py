"""Imports: rows of a database that become messages, each once, however often the import is killed and repeated."""
