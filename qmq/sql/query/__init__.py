"""Queries in SQL over messages, subjects, groups, consumers and dead letters, by DuckDB in this process."""
