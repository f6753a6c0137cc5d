"""Programs that measure QMQ beside others; `make bench-peers`."""
