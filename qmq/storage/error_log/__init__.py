"""Items by due time or number in sorted runs: retries, dead letters, delayed messages."""
