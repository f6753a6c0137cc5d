"""The answers of the console: JSON, errors as JSON or as a page, and the status of each error of QMQ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from qmq.errors import (
    BrokersMissed,
    ConnectionLost,
    Forbidden,
    QmqError,
    Unauthorized,
    UnknownGroup,
    UnknownMessage,
    UsageError,
)

#: Makes the page of an error from its status and its message.
ErrorPage = Callable[[Request, int, str], Response]

_STATUS: Final[tuple[tuple[type[Exception], int], ...]] = (
    (UsageError, 400),
    (Unauthorized, 401),
    (Forbidden, 403),
    (UnknownGroup, 404),
    (UnknownMessage, 404),
    (BrokersMissed, 503),
    (ConnectionLost, 503),
)


class Conflict(QmqError):
    """Something has changed since the page was made, or the number that a person typed is not the present one."""

    code = "conflict"


def json_reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return *value* (of dataclasses, models, times and plain values) as JSON; NaN and infinity become null."""
    return Response(to_json(value, inf_nan_mode="null"), status, headers, "application/json")


def wants_page(request: Request) -> bool:
    """Return whether a person asks: the path is not below /api, and the client is a browser."""
    return not request.url.path.startswith("/api") and "text/html" in request.headers.get("accept", "")


def error_reply(
    request: Request, status: int, code: str, message: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error as ``{"error": code, "message": message}``, or as a page for a person."""
    if not wants_page(request):
        return json_reply({"error": code, "message": message}, status, headers)
    page: ErrorPage | None = getattr(request.app.state, "error_page", None)
    if page is None:
        return PlainTextResponse(message, status, headers)
    reply = page(request, status, message)
    reply.headers.update(headers or {})
    return reply


def failure_reply(request: Request, error: Exception) -> Response:
    """Return the answer to a request that failed with an error of QMQ, or because a broker took too long."""
    if isinstance(error, Conflict):
        status = 409
    else:
        status = next((status for kind, status in _STATUS if isinstance(error, kind)), 502)
    if isinstance(error, TimeoutError):
        return error_reply(request, 503, "timeout", "the broker did not answer in time; try again")
    code = error.code if isinstance(error, QmqError) else "error"
    return error_reply(request, status, code, str(error))
