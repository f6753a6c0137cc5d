"""Benchmarks of QMQ beside others: `make bench-peers` and `make bench-history`."""
