"""Runs the console: checks the address on which it may listen, opens the socket, and ends by a signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Final

import uvicorn
from starlette.applications import Starlette

from qmq.console.app import make_app, needs_token
from qmq.console.security import host_of, is_loopback
from qmq.errors import InvalidOption, StorageFailed, UsageError
from qmq.net.client.address import parse_url

log = logging.getLogger("qmq.console")

#: Seconds that a stop waits for requests that are under way.
STOP_SECONDS: Final = 5
#: The most connections at once.
MOST_CONNECTIONS: Final = 2_000


class ConsoleServer(uvicorn.Server):
    """An HTTP server that leaves signals alone, and ends streams of events before it waits for requests."""

    def __init__(self, config: uvicorn.Config, app: Starlette) -> None:
        super().__init__(config)
        self._console = app

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle no signal: ``serve`` does."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End streams of events, then wait for requests, then close."""
        self._console.state.stopping.set()
        await super().shutdown(sockets)


def check_listen(listen: str, servers: str, *, is_secure: bool) -> tuple[str, int]:
    """Return host and port to listen on. Raises InvalidOption for a text that is no address, and UsageError for an
    address that other machines reach while nobody must sign in.
    """
    host, port = host_of(listen), listen.rpartition(":")[2]
    if not host or not (port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 1 << 16):
        raise InvalidOption(f"--listen must be HOST:PORT such as 127.0.0.1:20880, not {listen!r:.100}")
    if is_loopback(host):
        return host, int(port)
    if not needs_token(parse_url(servers)):
        raise UsageError(
            f"the console would show everything to all who reach {listen}, and let them change it: it has no token, so "
            "nobody signs in; give it one (--token-file, QMQ_TOKEN), or listen on 127.0.0.1"
        )
    if not is_secure:
        log.warning(
            "browsers send tokens to %s without TLS: give --tls-cert-file and --tls-key-file, or put a proxy before it "
            "that takes TLS",
            listen,
        )
    return host, int(port)


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens there; with the host ``::`` for IPv4 too. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=512, dualstack_ipv6=host == "::")


async def serve(
    servers: str,
    listen: str,
    *,
    cert_file: Path | None = None,
    key_file: Path | None = None,
    on_ready: Callable[[str], object] = lambda url: None,
) -> None:
    """Serve the console until SIGINT or SIGTERM. *on_ready* is called with its URL.

    Raises InvalidOption, UsageError, StorageFailed for an address that cannot be listened on.
    """
    is_secure = cert_file is not None
    host, port = check_listen(listen, servers, is_secure=is_secure)
    app = make_app(servers, is_secure=is_secure)
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=STOP_SECONDS,
        ssl_certfile=cert_file,
        ssl_keyfile=key_file,
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        config.load()
    except OSError as error:
        raise InvalidOption(f"the certificate {cert_file} with the key {key_file} cannot be used: {error}") from error
    server = ConsoleServer(config, app)
    loop = asyncio.get_running_loop()
    try:
        listening = listening_socket(host, port)
    except OSError as error:
        raise StorageFailed(f"the console cannot listen on {listen}: {error.strerror or error}") from error
    with listening:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, _stop, server)
        shown = f"[{host}]" if ":" in host else host
        on_ready(f"{'https' if is_secure else 'http'}://{shown}:{listening.getsockname()[1]}/")
        try:
            await server.serve([listening])
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
    if not server.started:
        raise StorageFailed("the console did not start; its log says why")


def _stop(server: ConsoleServer) -> None:
    log.info("stopping")
    server.should_exit = True
