"""JSON under /api: the data of the pages, and the changes that they make.

Each endpoint is a function of the request and of its checked query or body. The broker checks each call against the
user's token. The console checks the right that an endpoint names before, so it refuses a change before it reads
anything. A change that destroys or repeats many messages must have their count, which a person has typed.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from qmq import BrokerInfo, BrokersMissed, Client, ConsumerInfo, DeadLetter, GroupInfo, StoredMessage
from qmq.console.events import shown_group, shown_totals
from qmq.console.history import History
from qmq.console.openapi import document
from qmq.console.replies import Conflict, error_reply, json_reply
from qmq.console.sign_in import Right, UserSession
from qmq.console.snapshot import Snapshot
from qmq.console.watch import FAST_SECONDS, Watch
from qmq.durations import seconds_of
from qmq.errors import Forbidden, InvalidOption
from qmq.net.client.group_settings import ChangedSettings

T = TypeVar("T")

#: Bytes of a body in an answer; a download has the whole body.
MOST_BODY: Final = 64 << 10
#: The count of reasons looks at this many dead letters.
MOST_REASONS: Final = 10_000
#: The most rows to pass over for a page, where a list can only be read from its beginning.
MOST_SKIPPED: Final = 100_000
#: The greatest age of the snapshot that a page shows, in seconds: twice the time between two snapshots.
_RECENT_SECONDS: Final = 2 * FAST_SECONDS
#: A search ends after this many seconds, and its answer says where to go on.
SEARCH_SECONDS: Final = 5.0


# --- what an endpoint takes ------------------------------------------------------------------------------------------


def _texts(value: object) -> object:
    """Return the texts of a field of a form: one, several, or one with a line for each."""
    if isinstance(value, str):
        return [text.strip() for text in value.replace(",", "\n").split("\n") if text.strip()]
    return value


def _none_if_empty(value: object) -> object:
    return None if isinstance(value, str) and not value.strip() else value


def _time(value: object) -> object:
    """Return a time: one with its zone, or how long ago, such as 2h. Raises InvalidOption."""
    if not isinstance(value, str) or not value.strip():
        return None if value == "" else value
    try:
        at = datetime.fromisoformat(value)
    except ValueError:
        at = None
    if at is None:
        try:
            return datetime.now(UTC) - timedelta(seconds=seconds_of("time", value))
        except OverflowError:
            raise InvalidOption(f"{value!r:.80} ago is no time: it is before the year 1") from None
    if at.tzinfo is None:
        raise InvalidOption(f"the time {value!r:.80} has no zone; give it as 2026-01-31T12:30Z")
    return at


Texts = Annotated[list[str], BeforeValidator(_texts)]
Time = Annotated[datetime | None, BeforeValidator(_time)]
Text = Annotated[str | None, BeforeValidator(_none_if_empty)]
Whole = Annotated[int | None, BeforeValidator(_none_if_empty)]


class Asked(BaseModel):
    """The query or the body of a request."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)


class Paged(Asked):
    """Rows from *offset* on, at most *limit*."""

    offset: int = Field(0, ge=0, le=MOST_SKIPPED)
    limit: int = Field(100, ge=1, le=1_000)


class GroupQuery(Paged):
    """Groups whose names have the text *search*."""

    search: str = ""
    sort: Literal["oldest", "name", "ready", "in_flight", "dead", "acked_rate"] = "oldest"


class SubjectQuery(Paged):
    """Subjects of a prefix."""

    prefix: str = ""


class Window(Asked):
    """The last seconds, of all groups together or of one."""

    seconds: int = Field(900, ge=5, le=3600)
    group: str | None = None


class MessageSearch(Asked):
    """Stored messages, chosen by prefix or subject, key, time and text; the oldest or newest first."""

    prefix: str = ""
    key: Text = None
    since: Time = None
    until: Time = None
    contains: Text = None
    newest: bool = True
    limit: int = Field(50, ge=1, le=500)
    cursor: Text = None


class SettingsChange(Asked):
    """Settings of a group, as ``set_group`` takes them, and the names that it follows."""

    settings: dict[str, Any] = Field(default_factory=dict)
    follows: Texts | None = None


class SeekTo(Asked):
    """The place to which a group moves: "first", "new", a time or a sequence."""

    to: str | StrictInt
    clear_retries: bool = False


class Deletion(Asked):
    """The name of the group, typed once more."""

    confirm: str


class LetterChange(Asked):
    """Dead letters by their message ids, or all; then ``count`` must be the present number of them."""

    ids: Texts | None = None
    all: bool = False
    count: Whole = None


class ResendRequest(Asked):
    """Messages by ids, or by prefix, key and time, and the group that gets them again. Without ``dry_run`` a selection
    needs ``count``, the number that a dry run has found.
    """

    ids: Texts | None = None
    prefix: Text = None
    key: Text = None
    since: Time = None
    until: Time = None
    group: Text = None
    all_groups: bool = False
    dry_run: bool = False
    count: Whole = None


# --- what an endpoint gives ------------------------------------------------------------------------------------------


class SessionAnswer(BaseModel):
    """The user, the rights of the user's token, and the token that each change must send as ``X-CSRF-Token``."""

    token: str | None
    csrf: str
    admin: bool
    browse: bool
    sees_all: bool


class Rows(BaseModel):
    """A page of rows: ``total`` is None where it is not known; ``next`` is the next offset, None at the end.
    ``missed`` are brokers that did not answer.
    """

    rows: list[Any]
    total: int | None = None
    next: int | None = None
    missed: list[str] = Field(default_factory=list)


class MessageAnswer(BaseModel):
    """A stored message. Its body is ``text`` where it is UTF-8, else ``base64``, up to 64 KiB of it (``is_cut``)."""

    id: str
    subject: str
    sequence: int | None
    key: str | None
    keys: list[str]
    priority: str
    order_key: str | None
    tags: list[str]
    properties: dict[str, str]
    created_at: datetime
    stored_at: datetime
    deliver_at: datetime | None
    expires_at: datetime | None
    replayed: bool
    source: str | None
    sender: str | None
    producer: str | None
    app: str | None
    size: int
    broker: str
    text: str | None
    base64: str | None
    is_cut: bool


class Found(BaseModel):
    """Messages of a search; ``cursor`` goes on with it, None at the end."""

    rows: list[MessageAnswer]
    cursor: str | None
    is_complete: bool
    missed: list[str]


class TraceAnswer(BaseModel):
    """The state of a message in each group, and its events there."""

    id: str
    message: MessageAnswer | None
    groups: list[Any]
    is_partial: bool
    missed: list[str]


class Changed(BaseModel):
    """The number of messages that a change has affected."""

    count: int


class Reasons(BaseModel):
    """The reasons of ``looked_at`` dead letters with their counts, the most frequent first."""

    reasons: list[tuple[str, int]]
    looked_at: int


# --- reading ---------------------------------------------------------------------------------------------------------


def session_of(request: Request) -> UserSession:
    """Return the session of a request."""
    session: UserSession = request.state.session
    return session


def client_of(request: Request) -> Client:
    """Return the user's client. Raises BrokersMissed at once where the watch knows that no broker answers."""
    watch: Watch = request.app.state.watch
    if watch.is_alone:
        raise BrokersMissed(f"no broker answers: {', '.join(watch.missed)}; try again when one does")
    return session_of(request).client


async def look(request: Request) -> Snapshot:
    """Return a snapshot of the last two seconds, and tell the watch that somebody looks."""
    watch: Watch = request.app.state.watch
    watch.look()
    return await watch.recent(_RECENT_SECONDS)


def _check_sees_all(request: Request) -> None:
    if not session_of(request).sees_all:
        raise Forbidden("the token may not see the whole broker: it needs the right to browse everything, ''")


def _group_name(request: Request) -> str:
    name: str = request.path_params["group"]
    return name


async def show_session(request: Request, asked: Asked) -> SessionAnswer:
    """Say who is signed in, and give the token that changes have to send."""
    session = session_of(request)
    return SessionAnswer(
        token=session.token_name,
        csrf=session.csrf,
        admin=session.may("admin"),
        browse=session.may("browse"),
        sees_all=session.sees_all,
    )


async def overview(request: Request, asked: Asked) -> dict[str, Any]:
    """Give an overview: rates, counts, the groups that are furthest behind, and the brokers."""
    _check_sees_all(request)
    snapshot = await look(request)
    return {
        "number": snapshot.number,
        "at": snapshot.at,
        **shown_totals(snapshot),
        "group_count": len(snapshot.groups),
        "behind": [shown_group(group, snapshot.at) for group in snapshot.behind()[:20]],
        "subjects": snapshot.subjects,
        "brokers": [
            {
                "broker": stats.broker, "version": stats.version, "started_at": stats.started_at,
                "uptime": stats.uptime, "connections": stats.connections, "log_bytes": stats.log_bytes,
                "disks": stats.disks, "damage": stats.damage, "checkpoint_age": stats.checkpoint_age,
                "memory_bytes": stats.memory_bytes, "cpu": stats.cpu, "archive": stats.archive,
            }
            for stats in snapshot.brokers
        ],
        "away": snapshot.away,
    }  # fmt: skip


async def history(request: Request, asked: Window) -> dict[str, list[float]]:
    """Give columns of the last hour: of all groups together, or of one."""
    if asked.group is None:
        _check_sees_all(request)
    elif not session_of(request).sees_group(asked.group):
        raise Forbidden(f"the token may not see group {asked.group!r:.220}")
    await look(request)
    kept: History = request.app.state.history
    return {name: column.tolist() for name, column in kept.columns(asked.group, asked.seconds)._asdict().items()}


async def groups(request: Request, asked: GroupQuery) -> Rows:
    """List groups with their rates, those with the oldest message first."""
    snapshot = await look(request)
    found = [group for group in session_of(request).groups_of(snapshot) if asked.search in group.name]
    if asked.sort == "oldest":
        found.sort(key=lambda group: (-group.oldest_age(snapshot.at), group.name))
    elif asked.sort != "name":
        found.sort(key=lambda group: (-getattr(group, asked.sort), group.name))
    rows = [shown_group(group, snapshot.at) for group in found[asked.offset : asked.offset + asked.limit]]
    following = asked.offset + asked.limit
    return Rows(
        rows=rows, total=len(found), next=following if following < len(found) else None, missed=sorted(snapshot.away)
    )


async def group(request: Request, asked: Asked) -> dict[str, Any]:
    """Show one group: its rates, and for each broker its counts and settings."""
    name, session, client = _group_name(request), session_of(request), client_of(request)
    rows: list[GroupInfo] = await client.admin.groups(name)
    now = await look(request)
    known = now.groups.get(name) if session.sees_group(name) else None
    return {
        "name": name,
        "at": now.at,
        "now": None if known is None else shown_group(known, now.at),
        "rows": rows,
        "missed": client.admin.missed,
    }


async def consumers(request: Request, asked: Asked) -> Rows:
    """List the consumers of a group, with the messages that each has in flight."""
    client = client_of(request)
    rows: list[ConsumerInfo] = await client.admin.consumers(_group_name(request))
    return Rows(rows=list(rows), total=len(rows), missed=list(client.admin.missed))


async def subjects(request: Request, asked: SubjectQuery) -> Rows:
    """List the subjects of a prefix, in the order of their creation."""
    client = client_of(request)
    found: Rows = await _page(client.subjects(asked.prefix), asked)
    found.missed = list(client.admin.missed)
    return found


async def brokers(request: Request, asked: Asked) -> Rows:
    """Show each broker: settings, versions, disks, connections, problems. Only administrators may see it."""
    client = client_of(request)
    rows: list[BrokerInfo] = await client.admin.info()
    snapshot = await look(request)
    return Rows(rows=list(rows), total=len(rows), missed=sorted({*client.admin.missed, *snapshot.away}))


async def messages(request: Request, asked: MessageSearch) -> Found:
    """Find stored messages. This changes nothing."""
    finder = client_of(request).find(
        asked.prefix,
        key=asked.key,
        since=asked.since,
        until=asked.until,
        contains=asked.contains,
        newest=asked.newest,
        limit=asked.limit,
        stop_after=SEARCH_SECONDS,
        cursor=asked.cursor,
    )
    rows = [shown_message(message, 1 << 10) async for message in finder]
    return Found(
        rows=rows,
        cursor=None if finder.is_complete else finder.cursor,
        is_complete=finder.is_complete,
        missed=list(finder.missed),
    )


async def message(request: Request, asked: Asked) -> MessageAnswer:
    """Show one message."""
    return shown_message(await client_of(request).get(request.path_params["id"]))


async def trace(request: Request, asked: Asked) -> TraceAnswer:
    """Show what has become of a message in each group."""
    found = await client_of(request).trace(request.path_params["id"])
    shown = None if found.message is None else shown_message(found.message)
    return TraceAnswer(
        id=found.id, message=shown, groups=list(found.groups), is_partial=found.is_partial, missed=list(found.missed)
    )


async def dead_letters(request: Request, asked: Paged) -> Rows:
    """List the dead letters of a group, the oldest first."""
    client = client_of(request)
    found: Rows = await _page(client.admin.dead_letters(_group_name(request)), asked)
    found.missed = list(client.admin.missed)
    return found


async def reasons(request: Request, asked: Asked) -> Reasons:
    """Count the reasons of the dead letters of a group."""
    counted, looked_at = Counter[str](), 0
    letters: AsyncIterator[DeadLetter] = client_of(request).admin.dead_letters(_group_name(request))
    async for letter in letters:
        counted[letter.reason] += 1
        looked_at += 1
        if looked_at == MOST_REASONS:
            break
    return Reasons(reasons=counted.most_common(100), looked_at=looked_at)


async def download(request: Request) -> Response:
    """Give the body of a message as a file."""
    found = await client_of(request).get(request.path_params["id"])
    disposition = f'attachment; filename="{found.id}.bin"'
    return Response(found.body, 200, {"content-disposition": disposition}, "application/octet-stream")


async def _page(rows: AsyncIterator[Any], asked: Paged) -> Rows:
    """Return a page of rows that can only be read from the first one on."""
    found, number, following = list[Any](), count(), None
    async for row in rows:
        at = next(number)
        if at == asked.offset + asked.limit:
            following = at
            break
        if at >= asked.offset:
            found.append(row)
    return Rows(rows=found, next=following)


def shown_message(found: StoredMessage, most: int = MOST_BODY) -> MessageAnswer:
    """Return a message with up to *most* bytes of its body."""
    body, text = found.body[:most], None
    is_cut = len(found.body) > most
    for end in range(len(body), max(len(body) - 4, -1) if is_cut else len(body) - 1, -1):  # a character may be cut
        try:
            text = body[:end].decode()
            break
        except UnicodeDecodeError:
            continue
    if text is not None and "\x00" in text:
        text = None
    return MessageAnswer(
        id=found.id, subject=found.subject, sequence=found.sequence, key=found.key, keys=list(found.keys),
        priority=found.priority, order_key=found.order_key, tags=list(found.tags), properties=found.properties,
        created_at=found.created_at, stored_at=found.stored_at, deliver_at=found.deliver_at,
        expires_at=found.expires_at, replayed=found.replayed, source=found.source, sender=found.sender,
        producer=found.producer, app=found.app, size=found.size, broker=found.broker, text=text,
        base64=None if text is not None else base64.b64encode(body).decode(), is_cut=is_cut,
    )  # fmt: skip


# --- changes ---------------------------------------------------------------------------------------------------------


async def set_group(request: Request, asked: SettingsChange) -> dict[str, Any]:
    """Change settings of a group, or the names that it follows; the request has all of the names."""
    name = _group_name(request)
    known = ChangedSettings.__annotations__
    if unknown := sorted(asked.settings.keys() - known.keys()):
        raise InvalidOption(f"a group has no setting {unknown[0]!r:.80}; it has {', '.join(known)}")
    return await client_of(request).admin.set_group(name, follows=asked.follows, **asked.settings)


async def seek(request: Request, asked: SeekTo) -> Changed:
    """Move a group to the first message, to the end, to a time or to a sequence."""
    to: Any = asked.to
    if isinstance(to, str) and to not in ("first", "new"):
        to = int(to) if to.isascii() and to.isdigit() and len(to) < 20 else _time(to)
    await client_of(request).admin.seek(_group_name(request), to, clear_retries=asked.clear_retries)
    return Changed(count=0)


async def delete_group(request: Request, asked: Deletion) -> Changed:
    """Delete a group with its cursors, retries and dead letters; the request must repeat its name."""
    name = _group_name(request)
    if asked.confirm != name:
        raise Conflict(f"nothing was deleted: type the name of the group, {name}, to delete it")
    await client_of(request).admin.delete_group(name)
    return Changed(count=1)


async def redrive(request: Request, asked: LetterChange) -> Changed:
    """Hand out dead letters again."""
    admin, name = client_of(request).admin, _group_name(request)
    await _check_letters(request, name, asked)
    return Changed(count=await admin.redrive(name, asked.ids, all=asked.all))


async def delete_dead(request: Request, asked: LetterChange) -> Changed:
    """Delete dead letters."""
    admin, name = client_of(request).admin, _group_name(request)
    await _check_letters(request, name, asked)
    return Changed(count=await admin.delete_dead(name, asked.ids, all=asked.all))


async def _check_letters(request: Request, name: str, asked: LetterChange) -> None:
    """Raise unless the change names ids, or all letters with their present number."""
    if not asked.all:
        if not asked.ids:
            raise InvalidOption("give the ids of dead letters, or all with their count")
        return
    _check_count(asked.count, await dead_count(client_of(request), name), "dead letters")


async def dead_count(client: Client, group: str) -> int:
    """Return how many dead letters a group has at all brokers. Raises BrokersMissed if one does not answer."""
    rows = await client.admin.groups(group)
    if client.admin.missed:
        raise BrokersMissed(f"nothing was done: no answer from {', '.join(client.admin.missed)}; try again")
    return sum(row.dead for row in rows)


def _check_count(typed: int | None, there: int, what: str) -> None:
    if typed != there:
        given = "no count was given" if typed is None else f"the count {typed:,} was given"
        raise Conflict(f"nothing was done: the count of {what} is {there:,} now, and {given}; give the one of now")


async def resend(request: Request, asked: ResendRequest) -> dict[str, int]:
    """Hand stored messages out again."""
    admin = client_of(request).admin
    terms: dict[str, Any] = asked.model_dump(exclude={"dry_run", "count"}, exclude_none=True)
    if not asked.dry_run and not asked.ids:
        _check_count(asked.count, int(await admin.resend(**terms, dry_run=True)), "messages to resend")
    done = await admin.resend(**terms, dry_run=asked.dry_run)
    return {
        "count": int(done), "groups": done.groups, "redriven": done.redriven, "waiting": done.waiting,
        "in_flight": done.in_flight, "retrying": done.retrying, "gone": done.gone,
    }  # fmt: skip


async def cancel(request: Request, asked: Asked) -> dict[str, bool]:
    """Cancel a delayed message."""
    return {"cancelled": await client_of(request).cancel(request.path_params["id"])}


# --- the table -------------------------------------------------------------------------------------------------------


class Endpoint(NamedTuple):
    """An endpoint: its function, the types of its query or body and of its answer, and the right for its change."""

    method: Literal["GET", "POST"]
    path: str
    run: Callable[[Request, Any], Awaitable[Any]]
    asked: type[Asked] = Asked
    answer: Any = dict[str, Any]
    needs: Right | None = None


_ONE_GROUP: Final = "/api/groups/{group}"
ENDPOINTS: Final = (
    Endpoint("GET", "/api/session", show_session, Asked, SessionAnswer),
    Endpoint("GET", "/api/overview", overview),
    Endpoint("GET", "/api/history", history, Window, dict[str, list[float | None]]),
    Endpoint("GET", "/api/groups", groups, GroupQuery, Rows),
    Endpoint("GET", _ONE_GROUP, group),
    Endpoint("GET", f"{_ONE_GROUP}/consumers", consumers, Asked, Rows),
    Endpoint("GET", f"{_ONE_GROUP}/dead-letters", dead_letters, Paged, Rows),
    Endpoint("GET", f"{_ONE_GROUP}/dead-letters/reasons", reasons, Asked, Reasons),
    Endpoint("GET", "/api/subjects", subjects, SubjectQuery, Rows),
    Endpoint("GET", "/api/messages", messages, MessageSearch, Found),
    Endpoint("GET", "/api/messages/{id}", message, Asked, MessageAnswer),
    Endpoint("GET", "/api/messages/{id}/trace", trace, Asked, TraceAnswer),
    Endpoint("GET", "/api/brokers", brokers, Asked, Rows),
    Endpoint("POST", f"{_ONE_GROUP}/settings", set_group, SettingsChange, needs="admin"),
    Endpoint("POST", f"{_ONE_GROUP}/seek", seek, SeekTo, Changed, "admin"),
    Endpoint("POST", f"{_ONE_GROUP}/delete", delete_group, Deletion, Changed, "admin"),
    Endpoint("POST", f"{_ONE_GROUP}/redrive", redrive, LetterChange, Changed, "admin"),
    Endpoint("POST", f"{_ONE_GROUP}/delete-dead", delete_dead, LetterChange, Changed, "admin"),
    Endpoint("POST", "/api/messages/resend", resend, ResendRequest, dict[str, int], "admin"),
    Endpoint("POST", "/api/messages/{id}/cancel", cancel, Asked, dict[str, bool], "produce"),
)


def check_right(session: UserSession, needs: Right | None) -> None:
    """Raise Forbidden unless the token of a session has a right."""
    if needs is not None and not session.may(needs):
        raise Forbidden(f"token {session.token_name!r} lacks a right: {needs}")


def checked(kind: type[Asked], values: dict[str, Any]) -> Any:
    """Return a query or a body, checked. Raises InvalidOption, which names the first wrong field."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the request"
        raise InvalidOption(f"{where}: {first.get('ctx', {}).get('error', first['msg'])}") from None


def routes() -> list[Route]:
    """Return the routes of all endpoints, of downloads and of the document that describes them."""
    described = document(ENDPOINTS)

    async def openapi(request: Request) -> Response:
        return json_reply(described)

    return [
        Route("/api/openapi.json", openapi, methods=["GET"]),
        *(Route(one.path, _handler(one), methods=[one.method], name=one.run.__name__) for one in ENDPOINTS),
        Route("/api/messages/{id}/body", download, methods=["GET"]),
        Route("/api/{path:path}", _nothing, methods=["GET"]),
    ]


def _handler(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        session = session_of(request)
        check_right(session, endpoint.needs)
        values = dict(request.query_params) if endpoint.method == "GET" else request.state.fields
        return json_reply(await endpoint.run(request, checked(endpoint.asked, values)))

    return handle


async def _nothing(request: Request) -> Response:
    return error_reply(request, 404, "not_found", f"the API has nothing at {request.url.path!r:.200}")
