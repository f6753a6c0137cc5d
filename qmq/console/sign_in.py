"""Sign-in: there is a client for each user's token, so the brokers check the rights of the user, and their audit names
the user.

A browser has a cookie that names its session; a program sends its token with each request (``Authorization: Bearer``).
Where the console has no token, nobody signs in: all users share one session, and the console listens on loopback only.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Literal
from urllib.parse import urlencode

from starlette.requests import HTTPConnection, Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from qmq import Client, QmqError, TokenRights, connect
from qmq.console.replies import error_reply, json_reply, wants_page
from qmq.console.snapshot import GroupNow, Snapshot
from qmq.errors import BrokersMissed, InvalidOption, Unauthorized
from qmq.names import takes
from qmq.net.client.address import token_of

log = logging.getLogger("qmq.console")

Right = Literal["admin", "produce", "consume", "group", "browse"]

#: Seconds after which a session that nobody uses ends.
IDLE_SECONDS: Final = 8 * 3600.0
#: Seconds after which the brokers are asked again for the rights of a token; the session of a revoked token ends.
RIGHTS_SECONDS: Final = 10.0
#: The most sessions at once; beyond these the session ends that was not used for longest.
MOST_SESSIONS: Final = 500
#: While no broker answers, seconds until they are asked again.
_RETRY_SECONDS: Final = 1.0
#: Seconds that a broker has to accept a token.
_CONNECT_SECONDS: Final = 5.0
#: Seconds that a request waits for the answer whether a token is still valid. A broker that is slower is asked again
#: RIGHTS_SECONDS later.
_STILL_HOLDS_SECONDS: Final = 1.0
#: The most sign-ins that are checked at once.
_AT_ONCE: Final = 16
#: This many failures of one address are answered at once; each further one is delayed twice as long, in seconds.
FREE_FAILURES: Final = 5
_FIRST_DELAY: Final = 0.25
MOST_DELAY: Final = 8.0
#: Seconds after which one failure is forgotten.
_FORGET_SECONDS: Final = 10.0
_MOST_ADDRESSES: Final = 10_000
#: Paths that need no session.
PUBLIC_PATHS: Final = frozenset({"/healthz", "/readyz", "/sign-in", "/favicon.ico"})
SIGN_IN: Final = "/sign-in"


class UserSession:
    """One user: the client with the user's token, and the rights of the token.

    Each change must send ``csrf``. ``token_name`` is None where nobody signs in.
    """

    def __init__(self, url: str, token: str | None) -> None:
        self.csrf = secrets.token_urlsafe(32)
        self.token_name = None if token is None else token_of(token).name
        self.is_bearer = False
        self.used_at = time.monotonic()
        self._url = url
        self._token = token
        self._client: Client | None = None
        self._rights: Sequence[TokenRights] = ()
        self._asked_at = float("-inf")
        self._lock = asyncio.Lock()
        self._error = "no broker has answered yet"

    @property
    def client(self) -> Client:
        """The client of the user's token. Raises BrokersMissed while no broker has let it in."""
        if self._client is None:
            raise BrokersMissed(f"no broker answers: {self._error}; try again when one does")
        return self._client

    def may(self, right: Right, name: str | None = None) -> bool:
        """Return whether the token has a right at each broker that answers: for anything at all, or with *name* for
        that subject, prefix or group ("" is all of them).

            session.may("admin"), session.may("browse"), session.may("group", "billing")
        """
        return bool(self._rights) and all(_may(rights, right, name) for rights in self._rights)

    @property
    def sees_all(self) -> bool:
        """Whether the token may see the statistics of the whole broker."""
        return self.may("browse", "")

    def sees_group(self, name: str) -> bool:
        """Return whether the token may see a group."""
        return self.sees_all or self.may("group", name.partition("@")[0])

    def groups_of(self, snapshot: Snapshot) -> list[GroupNow]:
        """Return the groups of a snapshot that the token may see, by name."""
        if self.sees_all:
            return list(snapshot.groups.values())
        return [group for name, group in snapshot.groups.items() if self.sees_group(name)]

    async def refresh(self) -> None:
        """Connect unless that is done, and from time to time ask for the rights of the token. A broker that is away
        changes nothing. Raises Unauthorized when the token is no longer valid.
        """
        if self._is_fresh() or (self._lock.locked() and self._rights):
            return
        async with self._lock:
            if self._is_fresh():
                return
            try:
                async with asyncio.timeout(_STILL_HOLDS_SECONDS if self._rights else _CONNECT_SECONDS):
                    await self._ask()
            except Unauthorized:
                await self.close()
                raise
            except (QmqError, OSError) as error:  # TimeoutError is one
                self._error = str(error) or "it did not answer in time"
            finally:
                self._asked_at = time.monotonic()

    def _is_fresh(self) -> bool:
        return time.monotonic() - self._asked_at < (RIGHTS_SECONDS if self._rights else _RETRY_SECONDS)

    async def _ask(self) -> None:
        if self._client is None:
            client = connect(self._url, token=self._token, name="console", app="qmq console", admin_timeout=10)
            try:
                await client
            except BaseException:
                with suppress(QmqError, OSError):
                    await client.close()
                raise
            self._client = client
        rights = await self._client.admin.rights()
        wrong = [one.broker for one in rights if self.token_name is not None and one.name != self.token_name]
        if wrong:
            raise Unauthorized(f"the broker at {', '.join(wrong)} does not check tokens, or takes this one for another")
        self._rights = rights

    async def close(self) -> None:
        """Close the client."""
        client, self._client, self._rights = self._client, None, ()
        if client is not None:
            with suppress(QmqError, OSError):
                await client.close()


def _may(rights: TokenRights, right: Right, name: str | None) -> bool:
    if rights.admin or right == "admin":
        return rights.admin
    prefixes: tuple[str, ...] = getattr(rights, right)
    return bool(prefixes) if name is None else takes(prefixes, name)


class FailedSignIns:
    """Counts failed sign-ins by address; the more there are, the later the next one is answered."""

    def __init__(self) -> None:
        self._by_address: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def failed(self, address: str, now: float) -> float:
        """Count a failure at the time *now*, in seconds; return after how many seconds to answer it."""
        weight, before = self._by_address.pop(address, (0.0, now))
        count = max(0.0, weight - (now - before) / _FORGET_SECONDS) + 1
        self._by_address[address] = count, now
        if len(self._by_address) > _MOST_ADDRESSES:
            self._by_address.popitem(last=False)
        over = int(count) - FREE_FAILURES
        return 0.0 if over <= 0 else min(_FIRST_DELAY * 2 ** min(over - 1, 16), MOST_DELAY)


class Sessions:
    """The sessions of one console. *url* names the brokers; without *needs_token* all share one session."""

    def __init__(self, url: str, *, needs_token: bool, is_secure: bool = False) -> None:
        self.needs_token = needs_token
        self.is_secure = is_secure
        self._url = url
        self._sessions: OrderedDict[str, UserSession] = OrderedDict()
        self._shared = None if needs_token else UserSession(url, None)
        self._failed = FailedSignIns()
        self._checked = asyncio.Semaphore(_AT_ONCE)

    @property
    def cookie(self) -> str:
        """The name of the cookie. Browsers accept one with the prefix ``__Host-`` only by TLS, and from this host."""
        return "__Host-qmq" if self.is_secure else "qmq"

    async def close(self) -> None:
        """End all sessions."""
        sessions = [*self._sessions.values(), *([] if self._shared is None else [self._shared])]
        self._sessions.clear()
        await asyncio.gather(*(session.close() for session in sessions))

    async def sign_in(self, token: str, address: str, *, is_bearer: bool = False) -> tuple[str, UserSession]:
        """Return a new session and the secret that names it. Raises Unauthorized if no broker accepts the token, after
        a delay that grows with the failures of this *address*; BrokersMissed if none answers.
        """
        name = _bearer_name(token) if is_bearer else secrets.token_urlsafe(32)
        try:
            async with self._checked:
                if not token.strip():
                    raise Unauthorized("give a token, NAME:SECRET")
                if is_bearer and name in self._sessions:  # made while this one waited
                    return name, self._sessions[name]
                session = UserSession(self._url, token)
                try:
                    await session.refresh()
                    session.client  # noqa: B018  # raises where no broker has answered
                except BaseException:  # a request that is cancelled, too: nobody else knows this session
                    await session.close()
                    raise
        except (Unauthorized, InvalidOption) as error:
            delay = self._failed.failed(address, time.monotonic())
            log.warning("sign-in from %s failed", address)
            await asyncio.sleep(delay)
            raise Unauthorized(str(error)) from None
        session.is_bearer = is_bearer
        self._sessions[name] = session
        if not is_bearer:
            log.info("token %r signed in from %s", session.token_name, address)
        if len(self._sessions) > MOST_SESSIONS:
            _, oldest = self._sessions.popitem(last=False)
            await oldest.close()
        return name, session

    async def sign_out(self, name: str) -> None:
        """End a session."""
        session = self._sessions.pop(name, None)
        if session is not None:
            await session.close()

    async def of(self, connection: HTTPConnection) -> UserSession | None:
        """Return the session of a request; None if it has none. Raises Unauthorized, BrokersMissed for a token."""
        if self._shared is not None:
            await self._shared.refresh()
            return self._shared
        kind, _, token = connection.headers.get("authorization", "").partition(" ")
        is_bearer = kind.lower() == "bearer"
        name = _bearer_name(token) if is_bearer else connection.cookies.get(self.cookie, "")
        session = self._sessions.get(name)
        if session is not None and time.monotonic() - session.used_at > IDLE_SECONDS:
            await self.sign_out(name)
            session = None
        if session is None:
            return (await self.sign_in(token, _address(connection), is_bearer=True))[1] if is_bearer else None
        try:
            await session.refresh()
        except Unauthorized:
            self._sessions.pop(name, None)
            if is_bearer:
                raise
            return None
        session.used_at = time.monotonic()
        self._sessions.move_to_end(name)
        return session


def _bearer_name(token: str) -> str:
    return "bearer " + hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).hexdigest()


def _address(connection: HTTPConnection) -> str:
    return "" if connection.client is None else connection.client.host


class SignedIn:
    """ASGI: gives each request ``state.session``; refuses requests without one, except to paths that need none."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        path, sessions = request.url.path, request.app.state.sessions
        request.state.session = None
        if path in PUBLIC_PATHS or path.startswith("/static/"):
            await self._app(scope, receive, send)
            return
        try:
            request.state.session = await sessions.of(request)
        except Unauthorized as error:
            await _unauthorized(request, str(error))(scope, receive, send)
        except QmqError as error:
            await error_reply(request, 503, error.code, str(error))(scope, receive, send)
        else:
            if request.state.session is None:
                await _unauthorized(request, "sign in, or send a token: Authorization: Bearer NAME:SECRET")(
                    scope, receive, send
                )
            else:
                await self._app(scope, receive, send)


def _unauthorized(request: Request, message: str) -> Response:
    if wants_page(request) and request.method in ("GET", "HEAD"):
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(SIGN_IN + _query(next=target), 303)
    return error_reply(request, 401, Unauthorized.code, message, {"WWW-Authenticate": "Bearer"})


def _query(**values: str) -> str:
    return f"?{urlencode(values)}"


def local_path(target: object) -> str:
    """Return the path to go to after the sign-in: *target*, or "/" if that leads away from this console."""
    text = target if isinstance(target, str) else "/"
    is_local = text.startswith("/") and not text.startswith(("//", "/\\")) and text.isprintable() and "\\" not in text
    return text if is_local else "/"


async def post_sign_in(request: Request) -> Response:
    """Sign in with the token of a form, or of JSON: ``token`` and ``next``, the path to go to."""
    sessions: Sessions = request.app.state.sessions
    fields = request.state.fields
    target = local_path(fields.get("next"))
    if not sessions.needs_token:
        return RedirectResponse(target, 303)
    try:
        name, session = await sessions.sign_in(str(fields.get("token", "")), _address(request))
    except QmqError as error:
        if request.state.is_form:
            kind = "wrong" if isinstance(error, Unauthorized) else "away"
            return RedirectResponse(SIGN_IN + _query(failed=kind, next=target), 303)
        return error_reply(request, 401 if isinstance(error, Unauthorized) else 503, error.code, str(error))
    old = request.cookies.get(sessions.cookie)
    if old:
        await sessions.sign_out(old)
    reply: Response
    if request.state.is_form:
        reply = RedirectResponse(target, 303)
    else:
        reply = json_reply({"token": session.token_name, "csrf": session.csrf})
    reply.set_cookie(sessions.cookie, name, path="/", httponly=True, samesite="strict", secure=sessions.is_secure)
    return reply


async def post_sign_out(request: Request) -> Response:
    """End the session of the cookie."""
    sessions: Sessions = request.app.state.sessions
    await sessions.sign_out(request.cookies.get(sessions.cookie, ""))
    reply = RedirectResponse(SIGN_IN if sessions.needs_token else "/", 303)
    reply.delete_cookie(sessions.cookie, path="/", httponly=True, samesite="strict", secure=sessions.is_secure)
    return reply
