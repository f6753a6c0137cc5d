"""Groups: what they follow, their members and settings, and the state of each message."""
