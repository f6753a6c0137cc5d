"""The application: its routes, the layers that each request passes, and the objects that all requests share.

A request finds them here: ``request.state.session`` (a UserSession), ``request.app.state.watch`` (a Watch),
``.history`` (a History) and ``.sessions``; for a change ``request.state.fields``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from qmq import QmqError
from qmq.console import api, events, metrics, pages
from qmq.console.history import History
from qmq.console.replies import error_reply, failure_reply
from qmq.console.security import HEADERS, CheckedChanges, KnownHost, SafeHeaders
from qmq.console.sign_in import Sessions, SignedIn, post_sign_in, post_sign_out
from qmq.console.watch import ClientSource, StatsSource, Watch
from qmq.net.client.address import Address, parse_url


def needs_token(addresses: Sequence[Address]) -> bool:
    """Return whether users must sign in: when the console has a token, or a client certificate that stands for one."""
    return any(address.token or (address.tls is not None and address.tls.cert) for address in addresses)


def make_app(servers: str, *, is_secure: bool = False, sources: Sequence[StatsSource] | None = None) -> Starlette:
    """Return the application that shows the brokers of *servers*. *is_secure*: browsers reach it by TLS. *sources* give
    the statistics, by default a client of each broker.

    Raises InvalidOption for an address.
    """
    addresses = list(dict.fromkeys(parse_url(servers)))
    signs_in = needs_token(addresses)
    history = History()
    if sources is None:
        sources = [ClientSource(address.url, str(address), address.token) for address in addresses]
    watch = Watch(sources, [history.add])
    sessions = Sessions(servers, needs_token=signs_in, is_secure=is_secure)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with watch:
            try:
                yield
            finally:
                await sessions.close()

    app = Starlette(
        routes=_routes(),
        middleware=[
            Middleware(SafeHeaders, is_secure=is_secure),
            Middleware(KnownHost, is_open=not signs_in),
            Middleware(SignedIn),
            Middleware(CheckedChanges),
        ],
        exception_handlers={
            QmqError: _failed, OSError: _failed, HTTPException: _http_error, Exception: _unexpected,
        },
        lifespan=lifespan,
    )  # fmt: skip
    app.state.watch, app.state.history, app.state.sessions = watch, history, sessions
    app.state.error_page = pages.error_page
    #: Set when the console stops: streams of events end then.
    app.state.stopping = asyncio.Event()
    return app


def _routes() -> list[BaseRoute]:
    routes: list[BaseRoute] = [
        Route("/healthz", _healthz, methods=["GET"]),
        Route("/readyz", _readyz, methods=["GET"]),
        Route("/sign-in", post_sign_in, methods=["POST"]),
        Route("/sign-out", post_sign_out, methods=["POST"]),
        *events.routes(),
        *metrics.routes(),
        *api.routes(),  # the last below /api, as it answers what is not there
        *pages.routes(),
    ]
    return routes


async def _healthz(request: Request) -> Response:
    """Answer that the process lives."""
    return PlainTextResponse("ok\n")


async def _readyz(request: Request) -> Response:
    """Answer whether at least one broker answers."""
    watch: Watch = request.app.state.watch
    if watch.latest.number == 0:
        return PlainTextResponse("no broker was asked yet\n", 503)
    there, away = len(watch.latest.brokers), len(watch.latest.away)
    return PlainTextResponse(f"{there} of {there + away} brokers answer\n", 200 if there else 503)


async def _failed(request: Request, error: Any) -> Response:
    return failure_reply(request, error)


async def _http_error(request: Request, error: Any) -> Response:
    status: int = error.status_code
    message = f"there is nothing at {request.url.path!r:.200}" if status == 404 else str(error.detail)
    return error_reply(request, status, f"http_{status}", message, error.headers)


async def _unexpected(request: Request, error: Exception) -> Response:
    """Answer that the console has a bug; the log has the traceback."""
    return error_reply(request, 500, "internal_error", "the console failed; its log has the details", HEADERS)
