"""The client of asyncio, and the client without it."""
