"""Bytes on the wire (without I/O), the asyncio server, the asyncio client."""
