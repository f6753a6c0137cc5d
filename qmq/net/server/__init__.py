"""The asyncio server: decodes frames into commands, and encodes effects as answers."""

from qmq.net.server.options import ServerOptions
from qmq.net.server.server import Server, clock

__all__ = ["Server", "ServerOptions", "clock"]
