"""A small shop: its programs send and take messages by QMQ. README.md shows how to run them."""
