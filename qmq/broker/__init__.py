"""The rules of the broker: deterministic, no sockets, no clock, no asyncio."""
