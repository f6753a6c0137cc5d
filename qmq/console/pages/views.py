"""The routes of the pages. Each reads through the client of who is signed in, so the brokers check what it may see.

A form that changes something is posted twice: the first answer says what will happen and asks, the second has the field
``sure``, and where many messages are concerned also their count, ``typed``.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Final
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from qmq import Client, ConsumerInfo, DeadLetter, GroupInfo, SubjectInfo
from qmq.console.api import SEARCH_SECONDS, client_of, dead_count, download
from qmq.console.history import Columns
from qmq.console.pages.formats import age_text, counted, shown_body
from qmq.console.pages.plots import backlog_plot, oldest_plot, rate_plot
from qmq.console.pages.render import FOLDER, render
from qmq.console.replies import error_reply
from qmq.console.snapshot import GroupNow
from qmq.errors import BrokersMissed, InvalidOption, UnknownGroup, UnknownMessage

#: Rows of one page.
ROWS: Final = 50
#: Subjects and dead letters that one request looks at; the page says so where there are more.
_MOST_SUBJECTS: Final = 20_000
_MOST_LETTERS: Final = 2_000
_HOUR: Final = 3600
#: Groups that the overview shows.
_SHOWN_GROUPS: Final = 12
#: Consumers of a page.
_SHOWN_CONSUMERS: Final = 200
#: The order of the groups of a message: those that somebody has to look at come first.
_TROUBLE_FIRST: Final = {state: at for at, state in enumerate(
    ("dead", "retrying", "in_flight", "delayed", "expired", "deleted", "dropped", "acked", "handed_out")
)}  # fmt: skip
_SETTINGS: Final = (
    ("max_attempts", "attempts before a message is dead"),
    ("max_session_expiries", "sessions that may expire with a message"),
    ("max_unacked", "messages in flight at a consumer"),
    ("max_unacked_bytes", "their bytes"),
    ("retry_delays", "seconds before each next attempt"),
    ("ack_deadline", "seconds until an ack is due; 0: none"),
    ("reconnect_timeout", "seconds that a client that was cut off has to come back; empty: as the broker says"),
    ("expire_after", "seconds after which a message is dead; 0: never"),
    ("priority_share", "share of lower priorities, 0 to 1"),
    ("tags", "tags that the group takes; empty: all"),
)
_COUNTS: Final = frozenset({"max_attempts", "max_session_expiries", "max_unacked", "max_unacked_bytes"})
_SORTS: Final[dict[str, Callable[[GroupNow, datetime], Any]]] = {
    "oldest": lambda group, at: -group.oldest_age(at),
    "name": lambda group, at: group.name,
    "ready": lambda group, at: -group.ready,
    "in_flight": lambda group, at: -group.in_flight,
    "in_retry": lambda group, at: -group.in_retry,
    "dead": lambda group, at: -group.dead,
    "consumers": lambda group, at: group.consumers,
    "acked": lambda group, at: -group.acked_rate,
}


def routes() -> list[Route | Mount]:
    """Return the routes of all pages, of their forms, and of styles and scripts."""
    return [
        Mount("/static", StaticFiles(directory=FOLDER / "static"), name="static"),
        Route("/", overview),
        Route("/sign-in", sign_in),
        Route("/groups", groups),
        Route("/groups/{name}", group),
        Route("/groups/{name}/dead", dead_letters),
        Route("/groups/{name}/set", post_set, methods=["POST"]),
        Route("/groups/{name}/seek", post_seek, methods=["POST"]),
        Route("/groups/{name}/delete", post_delete, methods=["POST"]),
        Route("/groups/{name}/dead/redrive", post_redrive, methods=["POST"]),
        Route("/groups/{name}/dead/delete", post_delete_dead, methods=["POST"]),
        Route("/subjects", subjects),
        Route("/subjects/{name}", subject),
        Route("/find", find),
        Route("/messages/{id}", message),
        Route("/messages/{id}/body", download),
        Route("/messages/{id}/resend", post_resend, methods=["POST"]),
        Route("/messages/{id}/cancel", post_cancel, methods=["POST"]),
        Route("/dead", dead),
        Route("/brokers", brokers),
    ]


def _groups(request: Request) -> list[GroupNow]:
    """Return the groups that the user may see."""
    found: list[GroupNow] = request.state.session.groups_of(request.app.state.watch.latest)
    return found


async def _fresh(request: Request) -> None:
    """Note that somebody looks, and wait for the first snapshot."""
    watch = request.app.state.watch
    watch.look()
    if not watch.latest.number:
        try:
            await asyncio.wait_for(watch.newer_than(0), 3)
        except TimeoutError:
            pass  # the page says that it has no answer yet


# --- overview and groups ---------------------------------------------------------------------------------------------


async def overview(request: Request) -> Response:
    """Show which groups are behind and why, the rates, and the brokers."""
    await _fresh(request)
    snapshot = request.app.state.watch.latest
    seen = _groups(request)
    behind = [group for group in seen if group.oldest is not None]
    at_work = {group.name: _is_at_work(group, snapshot.at) for group in behind}
    behind.sort(key=lambda group: (at_work[group.name], -group.oldest_age(snapshot.at)))
    columns: Columns = request.app.state.history.columns(None, _HOUR)
    is_whole = request.state.session.sees_all
    return render(
        request,
        "overview.html",
        behind=behind[:_SHOWN_GROUPS],
        behind_count=len(behind),
        stuck_count=sum(not is_so for is_so in at_work.values()),
        at_work=lambda group: at_work[group.name],
        group_count=len(seen),
        ready=sum(group.ready for group in seen),
        in_flight=sum(group.in_flight for group in seen),
        in_retry=sum(group.in_retry for group in seen),
        dead=sum(group.dead for group in seen),
        acked_rate=sum(group.acked_rate for group in seen),
        oldest=max((group.oldest_age(snapshot.at) for group in seen), default=0.0),
        plots=[rate_plot(columns, of_group=False), backlog_plot(columns), oldest_plot(columns)] if is_whole else [],
    )  # fmt: skip


def _is_at_work(group: GroupNow, at: datetime) -> bool:
    why = group.why(at)
    return why is None or why.is_good


async def groups(request: Request) -> Response:
    """List the groups, filtered, sorted, a page of them."""
    await _fresh(request)
    at, query = request.app.state.watch.latest.at, request.query_params
    wanted, sort = query.get("q", "").strip(), query.get("sort", "oldest")
    sort = sort if sort in _SORTS else "oldest"
    seen = _groups(request)
    found = [group for group in seen if wanted.lower() in group.name.lower()]
    if query.get("behind"):
        found = [group for group in found if group.oldest is not None]
    found.sort(key=lambda group: (_SORTS[sort](group, at), group.name))
    number, rows, pages = _paged(found, query.get("page", "1"))
    return render(
        request, "groups.html", rows=rows, number=number, pages=pages, found=len(found), all_count=len(seen),
        wanted=wanted, sort=sort, sorts=list(_SORTS), at_work=lambda group: _is_at_work(group, at),
        only_behind=bool(query.get("behind")),
    )  # fmt: skip


def _paged(rows: list[Any], page: str) -> tuple[int, list[Any], int]:
    """Return the number of a page, its rows, and how many pages there are."""
    pages = max(1, -(-len(rows) // ROWS))
    number = min(max(int(page), 1), pages) if page.isdecimal() and len(page) < 10 else 1
    return number, rows[(number - 1) * ROWS : number * ROWS], pages


async def group(request: Request) -> Response:
    """Show one group: how far behind and why, its plots, consumers, blocked order keys and settings."""
    await _fresh(request)
    name, client = request.path_params["name"], client_of(request)
    # Both at once, so that a broker that is away is waited for once.
    infos, consumers = await asyncio.gather(client.admin.groups(name), _consumers(client, name))
    consumers.sort(key=lambda one: (one.in_flight_since is None, one.in_flight_since, not one.online, one.name))
    missed = client.admin.missed
    snapshot = request.app.state.watch.latest
    known = snapshot.groups.get(name)
    columns = request.app.state.history.columns(name, _HOUR)
    return render(
        request, "group.html", name=name, infos=infos, info=infos[0], now=known or _now_of(infos),
        consumers=consumers[:_SHOWN_CONSUMERS], consumer_count=len(consumers), missed=missed,
        blocked=[(info.broker, slot) for info in infos for slot in info.blocked],
        plots=[oldest_plot(columns), backlog_plot(columns), rate_plot(columns, of_group=True)],
        settings=[(key, _setting_field(infos[0].settings[key]), text) for key, text in _SETTINGS
                  if key in infos[0].settings],
        at=datetime.now(UTC),
    )  # fmt: skip


async def _consumers(client: Client, name: str) -> list[ConsumerInfo]:
    """Return the consumers of a group, which may have been deleted meanwhile."""
    try:
        return await client.admin.consumers(name)
    except UnknownGroup:
        return []


def _now_of(infos: list[GroupInfo]) -> GroupNow:
    """Return a group that no snapshot has yet, or no more."""
    oldest = min((info.oldest for info in infos if info.oldest is not None), default=None)
    first, blocked = infos[0], [slot for info in infos for slot in info.blocked]
    return GroupNow(
        first.name, tuple(info.broker for info in infos), first.mode, tuple(first.follows),
        sum(info.consumers for info in infos), sum(info.ready for info in infos),
        all(info.ready_exact for info in infos), sum(info.in_flight for info in infos),
        sum(info.in_retry for info in infos), sum(info.dead for info in infos), sum(info.delayed for info in infos),
        oldest, None, 0.0, 0.0, 0.0, sum(slot.waiting for slot in blocked), len(blocked),
        sum(slot.reason == "retrying" for slot in blocked),
    )  # fmt: skip


def _setting_field(value: Any) -> str:
    """Return the value of a setting as a form has it."""
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return ", ".join(f"{one:g}" if isinstance(one, float) else str(one) for one in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _group_url(name: str, **query: object) -> str:
    return f"/groups/{quote(name, safe='@')}" + (f"?{urlencode(query)}" if query else "")


# --- changes ---------------------------------------------------------------------------------------------------------


def _field(request: Request, name: str) -> str:
    """Return the last value of a field."""
    value = request.state.fields.get(name, "")
    return str(value[-1] if isinstance(value, list) else value).strip()


def _fields(request: Request, name: str) -> list[str]:
    """Return all values of a field."""
    value = request.state.fields.get(name, [])
    return [str(one) for one in value] if isinstance(value, list) else [str(value)]


def _ask(
    request: Request, title: str, text: str, button: str, back: str, *, count: int | None = None, problem: str = ""
) -> Response:
    """Return the page that says what a change does, and asks for the second click; with *count* it wants that typed."""
    kept = [
        (name, value) for name in request.state.fields if name not in ("csrf", "sure", "typed")
        for value in _fields(request, name)
    ]  # fmt: skip
    return render(
        request, "ask.html", status=409 if problem else 200, title=title, text=text, button=button, back=back,
        kept=kept, count=count, problem=problem, action=request.url.path,
    )  # fmt: skip


def _is_sure(request: Request) -> bool:
    return bool(_field(request, "sure"))


def _done(url: str, **query: object) -> Response:
    return RedirectResponse(f"{url}?{urlencode(query)}", 303)


async def post_set(request: Request) -> Response:
    """Change settings of a group."""
    name, changed = request.path_params["name"], dict[str, Any]()
    info = (await client_of(request).admin.groups(name))[0]
    for key, _ in _SETTINGS:
        if key in request.state.fields and key in info.settings:
            text = _field(request, key)
            if text != _setting_field(info.settings[key]):
                changed[key] = _setting_of(key, text)
    follows = _field(request, "follows")
    if follows and follows != ", ".join(one or '""' for one in info.follows):
        changed["follows"] = ["" if one == '""' else one for one in _listed(follows)]
    if not changed:
        return RedirectResponse(_group_url(name), 303)
    if not _is_sure(request):
        text = "; ".join(f"{key} becomes {_setting_field(value) or 'empty'}" for key, value in changed.items())
        return _ask(request, f"Change the settings of {name}", f"{text}. Consumers keep their connections.", "Change",
                    _group_url(name))  # fmt: skip
    await client_of(request).admin.set_group(name, **changed)
    return _done(_group_url(name), done="set")


def _listed(text: str) -> list[str]:
    return [one.strip() for one in text.split(",") if one.strip()]


def _setting_of(key: str, text: str) -> Any:
    """Return a setting as ``set_group`` takes it. Raises InvalidOption."""
    if key in ("retry_delays", "tags"):
        return _listed(text)
    if key == "reconnect_timeout" and not text:
        return None
    if key in _COUNTS or key == "priority_share":
        try:
            return float(text) if key == "priority_share" else int(text)
        except ValueError:
            kind = "number from 0 to 1" if key == "priority_share" else "whole number"
            raise InvalidOption(f"{key} must be a {kind}, not {text!r:.80}; go back and correct it") from None
    return text


async def post_seek(request: Request) -> Response:
    """Move a group to another place."""
    name, to = request.path_params["name"], _field(request, "to")
    target: Any
    if to == "time":
        target = _time_of(_field(request, "at"))
        if target is None:
            raise InvalidOption("no time is given; choose the time to which the group is moved")
        place = f"to the first message stored at {target:%Y-%m-%d %H:%M:%S} UTC or later"
    elif to in ("first", "new"):
        target, place = to, {"first": "to the first message that is stored", "new": "behind the last message"}[to]
    else:
        raise InvalidOption(f"a group is moved to first, new or time, not to {to!r:.80}")
    clears = bool(_field(request, "clear_retries"))
    if not _is_sure(request):
        retries = "Retries are dropped, too." if clears else "Retries stay."
        effect = {
            "first": "All stored messages are handed out again, also those that were acked.",
            "new": "Messages that wait are never handed out to this group.",
            "time": "Later messages are handed out again, also those that were acked; earlier ones are not.",
        }[to]
        text = (
            f"The group {name} is moved {place}. {effect} Messages in flight are dropped, and late acks of them are "
            f"refused. {retries}"
        )
        return _ask(request, f"Move {name}", text, "Move the group", _group_url(name))
    await client_of(request).admin.seek(name, target, clear_retries=clears)
    return _done(_group_url(name), done="sought")


def _time_of(text: str) -> datetime | None:
    """Return a time of a form, in UTC; None for an empty field. Raises InvalidOption."""
    if not text:
        return None
    try:
        at = datetime.fromisoformat(text)
        return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    except (ValueError, OverflowError):
        raise InvalidOption(f"{text!r:.80} is no time; give it as 2026-01-31T12:30") from None


async def post_delete(request: Request) -> Response:
    """Delete a group."""
    name = request.path_params["name"]
    infos = await client_of(request).admin.groups(name)
    dead_count, ready = sum(info.dead for info in infos), sum(info.ready for info in infos)
    text = (
        f"The group {name} is deleted with its cursors, retries and {counted(dead_count, 'dead letter')}; "
        f"{counted(ready, 'message')} {'is' if ready == 1 else 'are'} ready. Stored messages stay. A consumer that "
        "joins later makes the group anew."
    )
    count = dead_count or None
    if not _is_sure(request) or (count is not None and not _is_typed(request, count)):
        problem = _wrong_count(request) if _is_sure(request) else ""
        back = _group_url(name)
        return _ask(request, f"Delete {name}", text, "Delete the group", back, count=count, problem=problem)
    await client_of(request).admin.delete_group(name)
    return _done("/groups", done="deleted")


def _is_typed(request: Request, count: int) -> bool:
    return _field(request, "typed").replace(",", "") == str(count)


def _wrong_count(request: Request) -> str:
    return f"You typed {_field(request, 'typed')[:40] or 'nothing'}, and the count is another one. Nothing was done."


async def post_redrive(request: Request) -> Response:
    """Redrive dead letters: those that are chosen, or all."""
    return await _change_dead(request, "redrive")


async def post_delete_dead(request: Request) -> Response:
    """Delete dead letters: those that are chosen, or all."""
    return await _change_dead(request, "delete")


async def _change_dead(request: Request, action: str) -> Response:
    name, admin = request.path_params["name"], client_of(request).admin
    ids = list(dict.fromkeys(_fields(request, "id")))
    back = f"{_group_url(name)}/dead"
    if not ids and not _field(request, "all"):
        raise InvalidOption("no dead letter is chosen; go back and choose some, or all")
    if _field(request, "all"):
        ids = []
        count = await dead_count(client_of(request), name)
        subject = f"All {count:,} dead letters of {name}" if count != 1 else f"The only dead letter of {name}"
    else:
        count = len(ids)
        subject = f"{counted(count, 'dead letter')} of {name}"
    is_redrive = action == "redrive"
    effect = "handed out again, as if for the first time"
    if not is_redrive:
        effect = f"deleted; this group never gets {'it' if count == 1 else 'them'} again"
    ask: dict[str, Any] = {
        "title": f"{'Redrive' if is_redrive else 'Delete'} dead letters",
        "text": f"{subject} {'is' if count == 1 else 'are'} {effect}.",
        "button": f"{'Redrive' if is_redrive else 'Delete'} {count:,}",
        "back": back,
        "count": count if _field(request, "all") else None,
    }
    if not _is_sure(request):
        return _ask(request, **ask)
    if _field(request, "all") and not _is_typed(request, count):
        return _ask(request, **ask, problem=_wrong_count(request))
    change = admin.redrive if is_redrive else admin.delete_dead
    changed = await (change(name, ids) if ids else change(name, all=True))
    return _done(back, done="redriven" if is_redrive else "removed", count=changed)


async def post_resend(request: Request) -> Response:
    """Hand a message out again, to one group or to all that follow its subject."""
    message_id, name = request.path_params["id"], _field(request, "group")
    target: dict[str, Any] = {"group": name} if name else {"all_groups": True}
    back = f"/messages/{quote(message_id)}"
    if not _is_sure(request):
        count = await client_of(request).admin.resend(ids=[message_id], dry_run=True, **target)
        to = f"the group {name}" if name else f"all groups that follow its subject ({count.groups})"
        text = f"The message {message_id} is handed out again to {to}, as attempt 1, also where it was acked."
        if not count:
            text = f"Nothing would be handed out again to {to}: the message waits, is in flight, or is in retry there."
        return _ask(request, "Resend a message", text, "Resend it", back)
    count = await client_of(request).admin.resend(ids=[message_id], **target)
    return _done(back, done="resent", count=int(count))


async def post_cancel(request: Request) -> Response:
    """Cancel a delayed message."""
    message_id = request.path_params["id"]
    back = f"/messages/{quote(message_id)}"
    if not _is_sure(request):
        return _ask(request, "Cancel a delayed message", f"The message {message_id} is never delivered.", "Cancel it",
                    back)  # fmt: skip
    return _done(back, done="cancelled" if await client_of(request).admin.cancel(message_id) else "late")


# --- dead letters ----------------------------------------------------------------------------------------------------


async def dead(request: Request) -> Response:
    """List the groups that have dead letters."""
    await _fresh(request)
    found = sorted((one for one in _groups(request) if one.dead), key=lambda one: (-one.dead, one.name))
    number, rows, pages = _paged(found, request.query_params.get("page", "1"))
    return render(request, "dead.html", rows=rows, number=number, pages=pages, found=len(found),
                  letters=sum(one.dead for one in found))  # fmt: skip


async def dead_letters(request: Request) -> Response:
    """List the dead letters of a group, and the reasons."""
    name, query = request.path_params["name"], request.query_params
    client = client_of(request)
    letters, is_cut = await _first(client.admin.dead_letters(name), _MOST_LETTERS)
    total = sum(info.dead for info in await client.admin.groups(name))
    reasons = Counter(letter.reason for letter in letters).most_common(10)
    wanted = query.get("reason")
    found: list[DeadLetter] = [letter for letter in letters if wanted is None or letter.reason == wanted]
    found.sort(key=lambda letter: letter.died_at, reverse=True)
    number, rows, pages = _paged(found, query.get("page", "1"))
    return render(
        request, "dead_letters.html", name=name, rows=rows, number=number, pages=pages, found=len(found), total=total,
        looked=len(letters), reasons=reasons, wanted=wanted, is_cut=is_cut, missed=client.admin.missed,
        at=datetime.now(UTC),
    )  # fmt: skip


async def _first(rows: AsyncIterator[Any], most: int) -> tuple[list[Any], bool]:
    """Return the first rows, and whether there are more."""
    found = list[Any]()
    async for row in rows:
        if len(found) == most:
            return found, True
        found.append(row)
    return found, False


# --- subjects and messages -------------------------------------------------------------------------------------------


async def subjects(request: Request) -> Response:
    """List subjects by their names, and the rates of those that begin alike."""
    await _fresh(request)
    query, client = request.query_params, client_of(request)
    prefix, wanted = query.get("prefix", "").strip(), query.get("q", "").strip()
    infos, is_cut = await _first(client.subjects(prefix), _MOST_SUBJECTS)
    merged = dict[str, list[int]]()
    for info in infos:
        if wanted.lower() in info.name.lower():
            row = merged.setdefault(info.name, [0, 0])
            row[0] += info.messages
            row[1] += info.delayed
    found = sorted((name, *counts) for name, counts in merged.items())
    number, rows, pages = _paged(found, query.get("page", "1"))
    families = request.app.state.watch.latest.subjects if request.state.session.sees_all else ()
    return render(
        request, "subjects.html", rows=rows, number=number, pages=pages, found=len(found), prefix=prefix, wanted=wanted,
        families=sorted(families, key=lambda one: (-one.received_rate, one.name)) if not prefix else (),
        is_cut=is_cut, looked=len(infos), missed=client.admin.missed,
    )  # fmt: skip


async def subject(request: Request) -> Response:
    """Browse the messages of a subject."""
    name, client = request.path_params["name"], client_of(request)
    infos: list[SubjectInfo] = [info async for info in client.subjects(name) if info.name == name]
    followers = [one for one in _groups(request) if _follows(one.follows, name)]
    found = await _found(request, prefix=name)
    return render(
        request, "subject.html", name=name, infos=infos, messages=sum(info.messages for info in infos),
        delayed=sum(info.delayed for info in infos), followers=followers[:ROWS], follower_count=len(followers), **found,
    )  # fmt: skip


def _follows(prefixes: tuple[str, ...], subject: str) -> bool:
    return any(one in ("", subject) or (one.endswith(".") and subject.startswith(one)) for one in prefixes)


async def find(request: Request) -> Response:
    """Find messages by id, key, text or time."""
    query = request.query_params
    given = query.get("key", "").strip()
    if len(given) == 32 and all(one in "0123456789abcdefABCDEF" for one in given):
        try:
            await client_of(request).get(given)
        except (UnknownMessage, BrokersMissed):
            pass  # it may be a key that looks like an id
        else:
            return RedirectResponse(f"/messages/{given.lower()}", 303)
    prefix, contains = query.get("prefix", "").strip(), query.get("contains", "")
    is_asked = any(query.get(name, "").strip() for name in ("key", "prefix", "contains", "since", "until"))
    found: dict[str, Any] = {"messages_found": [], "cursor": None, "progress": None, "missed": (), "unreadable": 0,
                             "order": query.get("order", "newest"), "since": "", "until": ""}  # fmt: skip
    if is_asked:
        found = await _found(request, prefix=prefix, key=given or None, contains=contains or None)
    return render(request, "find.html", is_asked=is_asked, key=given, prefix=prefix, contains=contains, **found)


async def _found(request: Request, **terms: Any) -> dict[str, Any]:
    """Return a page of the messages of a search, and how to go on."""
    query = request.query_params
    order = "oldest" if query.get("order") == "oldest" else "newest"
    finder = client_of(request).find(
        since=_time_of(query.get("since", "")), until=_time_of(query.get("until", "")), newest=order == "newest",
        limit=ROWS, stop_after=SEARCH_SECONDS, cursor=query.get("cursor") or None, **terms,
    )  # fmt: skip
    return {
        "messages_found": [found async for found in finder], "cursor": finder.cursor, "progress": finder.progress,
        "missed": finder.missed, "unreadable": finder.unreadable, "order": order,
        "since": query.get("since", ""), "until": query.get("until", ""),
    }  # fmt: skip


async def message(request: Request) -> Response:
    """Show a message: its header, its body, and what became of it in each group."""
    trace = await client_of(request).trace(request.path_params["id"])
    found, wanted = trace.message, request.query_params.get("group", "").strip()
    has_it = [one for one in trace.groups if one.events or one.state != "not_subscribed"]
    ordered = sorted(has_it, key=lambda one: (_TROUBLE_FIRST.get(one.state, len(_TROUBLE_FIRST)), one.group))
    chosen = [one for one in ordered if wanted in one.group]
    timelines = [(one, _steps(one.events, found.stored_at if found else None)) for one in chosen[:ROWS]]
    return render(
        request, "message.html", trace=trace, message=found, timelines=timelines, wanted=wanted,
        more=Counter(one.state for one in chosen[ROWS:]), is_long=len(ordered) > ROWS,
        names_brokers=len({one.broker for one in trace.groups}) > 1, others=len(trace.groups) - len(has_it),
        body=None if found is None else shown_body(found.body, request.query_params.get("body")),
        groups=sorted({one.group for one in trace.groups if one.state != "not_subscribed"}),
        is_delayed=any(one.state == "delayed" for one in trace.groups) or (
            found is not None and found.sequence is None and found.deliver_at_us is not None),
        now=datetime.now(UTC),
    )  # fmt: skip


def _steps(events: Any, stored_at: datetime | None) -> list[tuple[Any, str]]:
    """Return the events of a timeline, each with the time since the one before."""
    times = [stored_at or (events[0].time if events else None), *(event.time for event in events)]
    gaps = [max(0.0, (then - before).total_seconds()) for before, then in pairwise(times)] if events else []
    return [(event, f"{gap * 1000:.0f}ms" if gap < 1 else age_text(gap)) for event, gap in zip(events, gaps)]  # noqa: B905


# --- brokers and sign-in ---------------------------------------------------------------------------------------------


async def brokers(request: Request) -> Response:
    """Show the brokers: health, disks, files, settings and connections."""
    await _fresh(request)
    infos, problem = {}, ""
    if request.state.session.may("admin"):
        try:
            infos = {info.broker: info for info in await client_of(request).admin.info()}
        except BrokersMissed as error:
            problem = str(error)
    elif not request.state.session.sees_all:
        return error_reply(
            request, 403, "forbidden", "this token may not see the brokers; it needs --browse '' for that"
        )
    return render(request, "brokers.html", infos=infos, problem=problem, at=datetime.now(UTC))


async def sign_in(request: Request) -> Response:
    """Show the form to sign in."""
    query = request.query_params
    return render(request, "sign_in.html", failed=query.get("failed", ""), next=query.get("next", "/"))
