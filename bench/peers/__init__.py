"""The same work on QMQ and on the brokers that users would choose instead: see bench/README.md."""
