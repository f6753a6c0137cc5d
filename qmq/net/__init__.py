"""The network: the protocol without I/O, the asyncio server, the clients."""
