"""Server-sent events: each new snapshot is one small event with the data of a page.

There is no queue for a tab: its stream takes the latest snapshot once it has sent the one before. So a slow reader
skips some snapshots and delays nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any, Final

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from qmq.console.replies import error_reply
from qmq.console.sign_in import UserSession
from qmq.console.snapshot import GroupNow, Snapshot
from qmq.console.watch import Watch
from qmq.errors import Forbidden, Unauthorized

#: The most streams at once.
MOST_STREAMS: Final = 500
#: The most groups in one event: those that are furthest behind.
MOST_GROUPS: Final = 50


def routes() -> list[Route]:
    """Return the route of events."""
    return [Route("/api/events", stream, methods=["GET"])]


async def stream(request: Request) -> Response:
    """Stream an event for each new snapshot: of one group (``?group=NAME``), else of all (``?page=overview``)."""
    session: UserSession = request.state.session
    group = request.query_params.get("group")
    if group is not None and not session.sees_group(group):
        raise Forbidden(f"the token may not see group {group!r:.220}")
    state = request.app.state
    if getattr(state, "streams", 0) >= MOST_STREAMS:
        return error_reply(request, 503, "too_many", f"{MOST_STREAMS} pages are open already; close some")
    return StreamingResponse(
        _events(state, session, group), headers={"x-accel-buffering": "no"}, media_type="text/event-stream"
    )


async def _events(state: Any, session: UserSession, group: str | None) -> AsyncIterator[bytes]:
    watch: Watch = state.watch
    state.streams = getattr(state, "streams", 0) + 1
    number = 0
    try:
        yield b"retry: 2000\n\n"
        while (snapshot := await _next(state, watch, number)) is not None:
            number = snapshot.number
            try:
                await session.refresh()
            except Unauthorized:
                yield b"event: signed-out\ndata: {}\n\n"
                return
            yield _packed(state, session, snapshot, group)
    finally:
        state.streams -= 1


def _packed(state: Any, session: UserSession, snapshot: Snapshot, group: str | None) -> bytes:
    """Return the event of a snapshot. All tabs that show the same page share it."""
    packed: dict[tuple[int, str | None], bytes] = getattr(state, "packed_events", {})
    key = snapshot.number, group
    if group is None and not session.sees_all:
        return _pack(snapshot, of_all(session, snapshot))
    if key not in packed:
        event = of_all(session, snapshot) if group is None else of_group(snapshot, group)
        state.packed_events = packed = {one: text for one, text in packed.items() if one[0] == snapshot.number}
        packed[key] = _pack(snapshot, event)
    return packed[key]


def _pack(snapshot: Snapshot, event: dict[str, Any]) -> bytes:
    return b"id: %d\nevent: snapshot\ndata: %b\n\n" % (snapshot.number, to_json(event, inf_nan_mode="null"))


async def _next(state: Any, watch: Watch, number: int) -> Snapshot | None:
    """Return the next snapshot; None when the console stops."""
    watch.look()
    newer, stopping = asyncio.ensure_future(watch.newer_than(number)), asyncio.ensure_future(state.stopping.wait())
    try:
        await asyncio.wait((newer, stopping), return_when=asyncio.FIRST_COMPLETED)
        return None if stopping.done() or newer.cancelled() else newer.result()
    finally:
        newer.cancel()
        stopping.cancel()


def of_all(session: UserSession, snapshot: Snapshot) -> dict[str, Any]:
    """Return the event of the overview and of the list of groups, with the groups that the session may see."""
    groups = [group for group in session.groups_of(snapshot) if group.oldest is not None]
    groups.sort(key=lambda group: (group.oldest, -group.ready, group.name))
    event: dict[str, Any] = {
        "number": snapshot.number,
        "at": snapshot.at,
        "away": sorted(snapshot.away),
        "groups": [shown_group(group, snapshot.at) for group in groups[:MOST_GROUPS]],
        "behind": len(groups),
    }
    if session.sees_all:
        oldest = snapshot.oldest
        age = 0.0 if oldest is None else max(0.0, (snapshot.at - oldest).total_seconds())
        event |= {**shown_totals(snapshot), "oldest_age": age}
    return event


def shown_totals(snapshot: Snapshot) -> dict[str, Any]:
    """Return the rates and counts of all groups in the form of events and of the overview."""
    return {
        "received_rate": snapshot.received_rate, "delivered_rate": snapshot.delivered_rate,
        "acked_rate": snapshot.acked_rate, "failed_rate": snapshot.failed_rate, "ready": snapshot.ready,
        "in_flight": snapshot.in_flight, "in_retry": snapshot.in_retry, "dead": snapshot.dead,
        "oldest": snapshot.oldest,
    }  # fmt: skip


def of_group(snapshot: Snapshot, name: str) -> dict[str, Any]:
    """Return the event of the page of one group; ``group`` is None where it is not there."""
    group = snapshot.groups.get(name)
    return {
        "number": snapshot.number,
        "at": snapshot.at,
        "away": sorted(snapshot.away),
        "group": None if group is None else shown_group(group, snapshot.at),
    }


def shown_group(group: GroupNow, at: datetime) -> dict[str, Any]:
    """Return a group in the form of events and lists."""
    why = group.why(at)
    return {
        "name": group.name, "mode": group.mode, "consumers": group.consumers, "ready": group.ready,
        "ready_exact": group.ready_exact, "in_flight": group.in_flight, "in_retry": group.in_retry, "dead": group.dead,
        "delayed": group.delayed, "oldest": group.oldest, "oldest_age": group.oldest_age(at),
        "in_flight_since": group.in_flight_since, "delivered_rate": group.delivered_rate,
        "acked_rate": group.acked_rate, "failed_rate": group.failed_rate, "reason": "" if why is None else why.text,
        "reason_code": None if why is None else why.code,
    }  # fmt: skip
