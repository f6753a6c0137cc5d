"""A console for tests, on a free port of this process, and a client of its HTTP."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import uvicorn
from starlette.applications import Starlette

from qmq.console.app import make_app
from qmq.console.serve import ConsoleServer
from qmq.console.watch import StatsSource


@dataclass
class Reply:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Browser:
    """Asks one console; it keeps the cookie that it gets, and sends the CSRF token of its session."""

    port: int
    token: str | None = None
    cookie: str | None = None
    csrf: str | None = None
    tls: ssl.SSLContext | None = None
    headers: dict[str, str] = field(default_factory=dict)

    async def ask(
        self, method: str, path: str, fields: Mapping[str, Any] | None = None, *, form: bool = False, **headers: str
    ) -> Reply:
        """Send a request. Names of *headers* have _ for -; an empty one is left out."""
        return await asyncio.to_thread(self._ask, method, path, fields, form, headers)

    def _ask(
        self, method: str, path: str, fields: Mapping[str, Any] | None, form: bool, headers: Mapping[str, str]
    ) -> Reply:
        sent = {"accept": "application/json", **self.headers}
        if self.token is not None:
            sent["authorization"] = f"Bearer {self.token}"
        if self.cookie is not None:
            sent["cookie"] = self.cookie
        if self.csrf is not None and method == "POST":
            sent["x-csrf-token"] = self.csrf
        body = None
        if fields is not None:
            body = urlencode(fields) if form else json.dumps(fields)
            sent["content-type"] = "application/x-www-form-urlencoded" if form else "application/json"
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = (
            http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            if self.tls is None
            else http.client.HTTPSConnection("127.0.0.1", self.port, timeout=60, context=self.tls)
        )
        try:
            connection.request(method, path, body, {name: value for name, value in sent.items() if value})
            answer = connection.getresponse()
            reply = Reply(answer.status, answer.headers, answer.read())
        finally:
            connection.close()
        if given := reply.headers.get("set-cookie"):
            self.cookie = given.partition(";")[0]
        return reply

    async def get(self, path: str, **query: Any) -> Any:
        """Return the JSON at a path, which must be there."""
        reply = await self.ask("GET", f"{path}?{urlencode(query)}" if query else path)
        assert reply.status == 200, reply.body
        return reply.json()

    async def post(self, path: str, **fields: Any) -> Any:
        """Make a change, which must succeed; return its JSON."""
        reply = await self.ask("POST", path, fields)
        assert reply.status == 200, reply.body
        return reply.json()

    async def sign_in(self, token: str) -> None:
        """Sign in as a browser does."""
        reply = await self.ask("POST", "/sign-in", {"token": token}, form=True)
        assert (reply.status, reply.headers["location"]) == (303, "/")
        self.csrf = (await self.get("/api/session"))["csrf"]


@dataclass
class RunningConsole:
    app: Starlette
    server: ConsoleServer
    port: int

    async def browser(self) -> Browser:
        """A browser of a console where nobody signs in, or that is still to sign in."""
        browser = Browser(self.port)
        reply = await browser.ask("GET", "/api/session")
        browser.csrf = reply.json()["csrf"] if reply.status == 200 else None
        return browser


@asynccontextmanager
async def running_console(servers: str, sources: Sequence[StatsSource] | None = None) -> AsyncIterator[RunningConsole]:
    """A console of some brokers in this process; its token is that of the environment."""
    app = make_app(servers, sources=sources)
    config = uvicorn.Config(
        app, http="h11", ws="none", lifespan="on", log_config=None, access_log=False, timeout_graceful_shutdown=5
    )
    server = ConsoleServer(config, app)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        task = asyncio.create_task(server.serve([listening]))
        try:
            yield RunningConsole(app, server, listening.getsockname()[1])
        finally:
            server.should_exit = True
            await task
