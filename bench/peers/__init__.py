"""The same work on QMQ and on every broker that a user would pick instead: see bench/README.md."""
