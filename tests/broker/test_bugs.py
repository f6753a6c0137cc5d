"""A bug of the broker in the middle of a request: that request is refused, and the others go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qmq.broker.delivery.serve import PullServer
from qmq.broker.find.find import Finds
from qmq.broker.find.trace.traces import Traces
from qmq.broker.ports.commands import Find, InfoFound, TraceMessage
from qmq.broker.ports.effects import Effect, FoundMessages, PulledMessages, Refused
from qmq.errors import InternalError
from qmq.format.layout import MESSAGE_ID
from qmq.net.protocol.selection import Selection
from tests.broker.harness import Driven


def fail(*args: Any) -> Any:
    raise ZeroDivisionError("a bug")


def refusal_of(said: list[Effect], request: int) -> None:
    (refused,) = [effect for effect in said if isinstance(effect, Refused)]
    assert refused.request == request
    assert isinstance(refused.error, InternalError)
    assert isinstance(refused.error.__cause__, ZeroDivisionError)  # which the server logs


def test_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(tmp_path)
    driven.send("a", b"1")
    with monkeypatch.context() as within:
        within.setattr(Finds, "_answer", fail)
        find = Find(1, driven.request(), Selection())
        refusal_of(driven.do(find), find.request)
    (answer,) = driven.do(Find(1, driven.request(), Selection()))
    assert isinstance(answer, FoundMessages)
    driven.close()


def test_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(tmp_path)
    sent = driven.send("a", b"1")
    monkeypatch.setattr(Traces, "_run", lambda self, command: (fail() for _ in "1"))
    name = MESSAGE_ID.pack(driven.store.store_id, sent.partition, sent.position)
    trace = TraceMessage(1, driven.request(), name, ())
    refusal_of(driven.do(trace) + driven.advance(1_000), trace.request)
    driven.close()


def test_a_pull_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(tmp_path)
    first, second = driven.subscribe("a", group="g"), driven.subscribe("a", group="h")
    pulls = [driven.pull_command(one, timeout_ms=60_000) for one in (first, second)]
    assert driven.do(*pulls) == []
    tried = PullServer._try

    def fails_once(server: PullServer, *args: Any) -> int | None:
        monkeypatch.setattr(PullServer, "_try", tried)
        return fail()  # type: ignore[no-any-return]

    monkeypatch.setattr(PullServer, "_try", fails_once)
    said = driven.do(driven.send_command({"a": [b"1"]}))
    (refused,) = [effect for effect in said if isinstance(effect, Refused)]
    (pulled,) = [effect for effect in said if isinstance(effect, PulledMessages)]
    assert {refused.request, pulled.request} == {pull.request for pull in pulls}
    refusal_of(said, refused.request)
    assert driven.broker.waiting_pulls() == 0
    driven.store.close(clean=True)


def test_what_only_the_process_knows(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    refusal_of(driven.do(InfoFound(1, 7, {}, ZeroDivisionError("a bug"))), 7)
    driven.close()
