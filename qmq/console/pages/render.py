"""Renders a template with what every page has: who is signed in, which brokers are away, and what was just done."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

import jinja2
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from qmq.console.pages.formats import FILTERS

_PHRASES: Final = {status.value: status.phrase for status in HTTPStatus}
FOLDER: Final = Path(__file__).parent

_ENVIRONMENT: Final = jinja2.Environment(
    loader=jinja2.FileSystemLoader(FOLDER / "templates"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)
_ENVIRONMENT.filters.update(FILTERS)
_ENVIRONMENT.filters["segment"] = lambda name: quote(str(name), safe="@")

#: What was just done, by the word that a redirect has for it; a page shows no text that a link brings.
_DONE: Final = {
    "set": "The settings are changed.",
    "sought": "The group is moved.",
    "deleted": "The group is deleted.",
    "redriven": "{count} dead letters are handed out again.",
    "removed": "{count} dead letters are deleted.",
    "resent": "{count} deliveries of the message are under way.",
    "cancelled": "The message is cancelled.",
    "late": "It is too late: the message was delivered already.",
}


def render(request: Request, template: str, *, status: int = 200, **values: Any) -> Response:
    """Return a page."""
    session = getattr(request.state, "session", None)
    snapshot = request.app.state.watch.latest
    page = _ENVIRONMENT.get_template(template).render(
        request=request,
        path=request.url.path,
        session=session,
        may_admin=session is not None and session.may("admin"),
        may_browse=session is not None and session.may("browse"),
        sees_all=session is not None and session.sees_all,
        snapshot=snapshot,
        done=_done(request),
        with_query=lambda **changed: with_query(request, **changed),
        **values,
    )
    return HTMLResponse(page, status)


def error_page(request: Request, status: int, message: str) -> Response:
    """Return the page of an error."""
    title = _PHRASES.get(status, "Error")
    return render(request, "error.html", status=status, code=status, title=title, message=message)


def with_query(request: Request, **changed: object) -> str:
    """Return the query of the request with some values changed; None leaves one out. Another page is no longer meant
    where anything but the page is changed.
    """
    kept = {name: value for name, value in request.query_params.items() if name not in ("done", "count", "page")}
    kept.update({name: str(value) for name, value in changed.items()})
    return "?" + urlencode({name: value for name, value in kept.items() if changed.get(name, "") is not None})


def _done(request: Request) -> str:
    text = _DONE.get(request.query_params.get("done", ""), "")
    count = request.query_params.get("count", "")
    return text.format(count=f"{int(count):,}" if count.isdecimal() and len(count) < 16 else "Some")
