"""All targets by name, and how the work is shared among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from fuzz.answers import Answers
from fuzz.batches import Batches
from fuzz.client import Clients
from fuzz.files import Files
from fuzz.groups import Groups
from fuzz.kept import Spools, States
from fuzz.login import TokenWires
from fuzz.records import Records
from fuzz.tables import Tables
from fuzz.target import Target
from fuzz.wire import Wires


class Share(NamedTuple):
    """A target, and how many of every 1,000 frames are its. An input has several frames, or opens a store (files)."""

    make: Callable[[], Target]
    frames: int
    longest_input: int


TARGETS: Final[dict[str, Share]] = {
    "wire": Share(Wires, 650, 400),
    "login": Share(TokenWires, 50, 400),
    "batches": Share(Batches, 130, 200),
    "answers": Share(Answers, 19, 200),
    "client": Share(Clients, 30, 400),
    "tables": Share(Tables, 100, 2_000),
    "files": Share(Files, 1, 120),
    "groups": Share(Groups, 1, 120),
    "records": Share(Records, 20, 120),
    "spool": Share(Spools, 10, 400),
    "state": Share(States, 10, 400),
}
