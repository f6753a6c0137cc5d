"""Guards each answer and each change of the console by headers, the name of the host, origin, CSRF token and rights."""

from __future__ import annotations

import hmac
import ipaddress
import json
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qmq.console.replies import error_reply

#: A page has no script and no style of its own, loads nothing from elsewhere, and is shown in no other page's frame.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with less, browsers send no origin with a form
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
#: With this, browsers use only TLS for a year.
_STRICT_TRANSPORT: Final = "max-age=31536000"
#: The largest body of a request.
MOST_BYTES: Final = 1 << 20
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
#: Changes that need no session.
NO_SESSION: Final = frozenset({"/sign-in"})
#: Changes that need no right. To cancel a message needs the right to produce; all others need that of an administrator.
NO_RIGHT: Final = frozenset({"/sign-out"})


class SafeHeaders:
    """ASGI: gives each answer the headers that keep a browser from loading or running anything foreign."""

    def __init__(self, app: ASGIApp, is_secure: bool = False) -> None:
        self._app = app
        self._is_secure = is_secure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_static = scope["path"].startswith("/static/")

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                if self._is_secure:
                    headers["strict-transport-security"] = _STRICT_TRANSPORT
                if not is_static:
                    headers["cache-control"] = "no-store"
            await send(message)

        await self._app(scope, receive, with_headers)


class KnownHost:
    """ASGI: where nobody signs in, refuses requests to another host name than one of this machine.

    Otherwise a foreign page could let its own name resolve to 127.0.0.1, and read the console's answers.
    """

    def __init__(self, app: ASGIApp, is_open: bool) -> None:
        self._app = app
        self._is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] == "http" and self._is_open:
            request = Request(scope)
            if not is_loopback(host_of(request.headers.get("host", ""))):
                message = "without tokens the console answers to localhost and 127.0.0.1 only"
                await error_reply(request, 421, "unknown_host", message)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def host_of(netloc: str) -> str:
    """Return the host of HOST:PORT, without brackets; "" if the text is not of this form."""
    try:
        return urlsplit(f"//{netloc}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Return whether a host means this machine on every machine, as 127.0.0.1 does."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class CheckedChanges:
    """ASGI: accepts a change only from the console's own pages, or from a program with a token of its own.

    It reads the body, a form or JSON, for all routes. ``request.state.fields`` has the values by name (a list where a
    form has a name several times), ``request.state.is_form`` says whether the body was a form.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        refused = await _refusal(request)
        if refused is not None:
            await refused(scope, receive, send)
        else:
            await self._app(scope, _nothing_more, send)


async def _nothing_more() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _refusal(request: Request) -> Response | None:
    """Read the fields of a change; return the answer if it is refused."""
    if not _is_own_origin(request):
        return error_reply(request, 403, "other_origin", "this change comes from a page of another site")
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MOST_BYTES:
            return error_reply(request, 413, "too_large", f"a request has at most {MOST_BYTES:,} bytes")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    request.state.is_form = kind == "application/x-www-form-urlencoded"
    try:
        request.state.fields = fields = _fields_of(kind, bytes(body))
    except ValueError as error:
        return error_reply(request, 400, "invalid_body", str(error))
    session, path = request.state.session, request.url.path
    if path in NO_SESSION:
        return None
    given = request.headers.get("x-csrf-token") or fields.pop("csrf", "")
    is_same = hmac.compare_digest(str(given).encode("utf-8", "replace"), session.csrf.encode())
    if not is_same and not session.is_bearer:
        return error_reply(request, 403, "csrf", "this change lacks the token of its page; load the page again")
    needs = "produce" if path.endswith("/cancel") else "admin"
    if path not in NO_RIGHT and not session.may(needs):
        return error_reply(request, 403, "forbidden", f"token {session.token_name!r} lacks a right: {needs}")
    return None


def _is_own_origin(request: Request) -> bool:
    origin = request.headers.get("origin")
    if origin is not None:
        return origin.partition("://")[2].lower() == request.headers.get("host", "").lower() != ""
    return request.headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none")


def _fields_of(kind: str, body: bytes) -> dict[str, Any]:
    """Return the fields of a body. Raises ValueError."""
    if not body:
        return {}
    if kind == "application/x-www-form-urlencoded":
        values = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=10_000)
        return {name: several[0] if len(several) == 1 else several for name, several in values.items()}
    if kind != "application/json":
        raise ValueError("give the fields as application/json, or as a form")
    try:
        found = json.loads(body)
    except RecursionError:
        raise ValueError("the JSON of the request is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("the JSON of the request is no object")
    return found
