"""The asyncio server: connections, frames to commands, effects to answers."""

from qmq.net.server.server import Server, ServerOptions, clock

__all__ = ["Server", "ServerOptions", "clock"]
