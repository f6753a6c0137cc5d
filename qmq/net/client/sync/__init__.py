"""The client without asyncio: the same calls from any thread."""
