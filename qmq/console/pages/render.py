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

#: What was just done, by the word that a redirect has for it, to one message and to several; a page shows no text that
#: a link brings.
_DONE: Final[dict[str, tuple[str, ...]]] = {
    "set": ("The settings are changed.",),
    "sought": ("The group is moved.",),
    "deleted": ("The group is deleted.",),
    "redriven": ("A dead letter is handed out again.", "{count} dead letters are handed out again."),
    "removed": ("A dead letter is deleted.", "{count} dead letters are deleted."),
    "resent": ("One group gets the message again.", "{count} groups get the message again."),
    "cancelled": ("The message is cancelled.",),
    "late": ("It is too late: the message was delivered already.",),
}


def render(request: Request, template: str, *, status: int = 200, **values: Any) -> Response:
    """Return a page."""
    session = getattr(request.state, "session", None)
    snapshot = request.app.state.watch.latest
    page = _ENVIRONMENT.get_template(template).render(
        request=request,
        menu=_menu(request.url.path),
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


def _menu(path: str) -> str:
    """Return the path of the page in the menu that a page belongs to."""
    parts = path.strip("/").split("/")
    if parts[0] == "groups" and parts[2:3] == ["dead"]:
        return "/dead"
    return "/find" if parts[0] == "messages" else f"/{parts[0]}"


def _done(request: Request) -> str:
    texts = _DONE.get(request.query_params.get("done", ""), ("",))
    count = request.query_params.get("count", "")
    number = int(count) if count.isdecimal() and len(count) < 16 else None
    return texts[0 if number == 1 else -1].format(count="Some" if number is None else f"{number:,}")
