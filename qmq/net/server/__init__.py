"""The asyncio server: connections, frames to commands, effects to answers."""

from qmq.net.server.options import ServerOptions
from qmq.net.server.server import Server, clock

__all__ = ["Server", "ServerOptions", "clock"]
