"""Archives of sealed segments, and the readers of stored segments, which need no broker."""
