"""The audit: one line of the log for each change that somebody makes by the calls of ``client.admin``."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Final

from qmq.broker.ports.access import ACTIONS
from qmq.broker.ports.commands import Administer
from qmq.errors import QmqError
from qmq.net.server.connection import ClientConnection

log = logging.getLogger("qmq.audit")

#: The most characters of a value; of a longer list its length is shown.
_MOST: Final = 200
_MOST_LISTED: Final = 5
#: Resends whose client asks again and again how far they are.
_MOST_RUNS: Final = 1_000


class Audit:
    """Logs the changes of administrators once they are done or refused: who, from where, and what."""

    def __init__(self) -> None:
        self._runs: OrderedDict[bytes, None] = OrderedDict()

    def asked(self, connection: ClientConnection, command: Administer) -> None:
        """Note a request; if it is a change, its answer is logged."""
        action, fields = ACTIONS.get(command.action), command.fields
        if action is None or not action.is_audited or fields.get("dry_run"):
            return
        run = fields.get("run")
        if command.action == "resend" and isinstance(run, bytes):
            if run in self._runs:
                return
            self._runs[run] = None
            if len(self._runs) > _MOST_RUNS:
                self._runs.popitem(last=False)
        given = " ".join(f"{name}={_shown(fields[name])}" for name in action.fields if fields.get(name) is not None)
        connection.audits[command.request] = f"{command.action} {given}".rstrip()

    @staticmethod
    def answered(connection: ClientConnection, request: int, error: QmqError | None = None) -> None:
        """Log a change that was answered."""
        what = connection.audits.pop(request, None)
        if what is not None:
            _log(connection, what, "done" if error is None else f"refused: {error}")

    @staticmethod
    def left(connection: ClientConnection) -> None:
        """Log the changes of a connection that ends before their answers: they may be done."""
        for what in connection.audits.values():
            _log(connection, what, "asked for by a client that has left since")
        connection.audits.clear()


def _log(connection: ClientConnection, what: str, outcome: str) -> None:
    who = "no token" if connection.login is None else f"token {connection.login.rights.name!r}"
    log.info("%s, %s: %s (%s)", who, connection.shown, what, outcome)


def _shown(value: object) -> str:
    """Return a value that a client gave as one word or so of a line, whatever is in it."""
    if isinstance(value, bytes):
        return value[:_MOST].hex()
    if isinstance(value, list) and len(value) > _MOST_LISTED:
        return f"[{len(value):,}]"
    text = repr(value)
    return text if len(text) <= _MOST else f"{text[:_MOST]}..."
