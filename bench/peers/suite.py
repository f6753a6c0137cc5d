"""A run of the bench: install, measure in turn, and collect the results."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median
from subprocess import SubprocessError
from typing import Any, Final

from bench.peers import loopback
from bench.peers.patience import at_most
from bench.peers.peer import Absent, Client, Installed, Peer
from bench.peers.plan import Step, steps
from bench.peers.report.results import numbers, rows_of
from bench.peers.running import Amount, Row, running
from bench.peers.works import WORKS
from qmq.bench.suite import machine
from qmq.bench.values import BenchFailed
from qmq.errors import InvalidOption

Say = Callable[[str], None]
#: The errors that a step may raise; any other is a bug of the bench.
_FAILURES: Final = (BenchFailed, Absent, OSError, ValueError, LookupError, SubprocessError)


@dataclass
class Suite:
    """The plan and the results so far."""

    peers: Sequence[Peer]
    works: Sequence[str]
    rounds: int
    amount: Amount
    home: Path
    scratch: Path
    command: str
    #: Seconds that a step may take, without the start of its broker.
    most_s: float = 600.0
    installed: dict[str, Installed] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    rows: list[tuple[int, Row]] = field(default_factory=list)
    #: The completed steps, in plain types.
    done: list[list[Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)
    machine: Mapping[str, Any] = field(default_factory=dict)
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def install(self, say: Say) -> None:
        """Make sure that all brokers are installed; those that cannot be are reported and left out."""
        self.home.mkdir(parents=True, exist_ok=True)
        for peer in self.peers:
            try:
                self.installed[peer.name] = peer.install(self.home)
            except Absent as why:
                self.absent[peer.name] = str(why)
                say(f"{peer.title} is absent: {why}")
        self.machine = self.machine or machine(self.scratch)

    def measure(self, say: Say, saved: Callable[[], None]) -> None:
        """Do all works in turn. A work that fails is reported, and the others go on; *saved* is called after each.

        Steps that an earlier run has completed (see `resume`) are skipped.
        """
        for step in self.plan():
            if step.as_json() in self.done:
                continue
            say(f"round {step.number + 1} of {self.rounds}: {step.work}, {step.peer.title}, {step.promise}")
            began = time.monotonic()
            try:
                self._do(step, say)
                self.done.append(step.as_json())
            except _FAILURES as why:
                self.failures.append(failure(step, why))
                say(f"    failed: {why}")
            say(f"    {time.monotonic() - began:.0f} s")
            saved()

    def resume(self, found: Mapping[str, Any]) -> None:
        """Continue an interrupted run; steps that failed are tried again.

        Raises InvalidOption if it had other amounts, or has numbers of a peer that this run lacks.
        """
        amount = json.loads(json.dumps(self.amount._asdict()))
        if found["amount"] != amount:
            raise InvalidOption(f"the saved run moved other amounts: {found['amount']}, not {amount}")
        if missing := {peer["name"] for peer in found["peers"]} - {peer.name for peer in self.peers}:
            raise InvalidOption(
                f"the saved run has numbers of {', '.join(sorted(missing))} too; name these peers as well"
            )
        self.done = [list(step) for step in found["steps"]]
        self.rows = rows_of(found["numbers"])
        self.machine, self.date = found["machine"], found["date"]

    def plan(self) -> list[Step]:
        """Return the steps for the installed peers."""
        there = [peer for peer in self.peers if peer.name in self.installed]
        return list(steps(there, self.works, self.rounds))

    def _do(self, step: Step, say: Say) -> None:
        with running(step.peer, step.promise, self.home, self.scratch, self.amount) as one:
            with at_most(self.most_s):
                for row in WORKS[step.work].do(one):
                    self._note(step, row, say)
            server = Client("server", "", {}, {})
            for what, value, unit in (
                (f"{step.work}: most memory of its own", one.most_memory.own, "bytes"),
                (f"{step.work}: most mapped files", one.most_memory.file, "bytes"),
                (f"{step.work}: processor time", one.server.cpu_s(), "cpu s"),
                ("start", one.server.ready_after_s, "s"),
            ):
                self._note(step, one.row("server", server, "", what, value, unit), say)

    def _note(self, step: Step, row: Row, say: Say) -> None:
        say(f"    {row.client}, {row.way}, {row.what}: {row.value:,.4g} {row.unit}")
        self.rows.append((step.number, row))

    def found(self) -> dict[str, Any]:
        """Return all results in plain types."""
        return {
            "date": self.date,
            "command": self.command,
            "rounds": max((number for number, _ in self.rows), default=0) + 1,
            "amount": self.amount._asdict(),
            "machine": self.machine,
            "versions": {"python": platform.python_version()},
            "peers": [self._peer(peer) for peer in self.peers],
            "ways": ways_of(self.peers),
            "numbers": [number.as_json() for number in numbers(self.rows, self.peers)],
            "steps": self.done,
            "failures": self.failures,
        }

    def _peer(self, peer: Peer) -> dict[str, Any]:
        installed = self.installed.get(peer.name)
        starts = [row.value for _, row in self.rows if (row.peer, row.what) == (peer.name, "start")]
        return {
            "name": peer.name,
            "title": peer.title,
            "absent": self.absent.get(peer.name),
            "version": installed.version if installed else None,
            "size_bytes": installed.size_bytes if installed else None,
            "clients": {client.package: _version(client.package) for client in peer.clients},
            "tools": [tool.package for tool in peer.tools],
            "promises": {str(promise): says for promise, says in peer.promises.items()},
            "lacks": {work: why for work, why in peer.lacks.items() if work in self.works},
            "cannot": {str(promise): why for promise, why in peer.cannot.items()},
            "ready_after_s": median(starts) if starts else None,
        }


def failure(step: Step, why: Exception) -> dict[str, Any]:
    """Return a failure in plain types, its text on one line."""
    told = str(why) if isinstance(why, BenchFailed | Absent) else f"{type(why).__name__}: {why}"
    words = " ".join(told.split())
    return {
        "round": step.number,
        "work": step.work,
        "peer": step.peer.name,
        "promise": str(step.promise),
        "why": words if len(words) < 400 else f"{words[:150]} ... {words[-240:]}",
    }


def ways_of(peers: Sequence[Peer]) -> dict[str, str]:
    """Return descriptions of the ways, by "peer/client/work/way"."""
    copy = f"{loopback.NAME}/{loopback.CLIENT}/consume/{loopback.WAY}"
    return {copy: loopback.SAYS} | {
        f"{peer.name}/{client.package}/{work}/{name}": way.says
        for peer in peers
        for client in peer.drivers
        for work, ways in client.ways_by_work()
        for name, way in ways.items()
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
