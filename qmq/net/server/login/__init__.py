"""Logins: which connection belongs to which token, failed logins, and the log of what administrators change."""
