"""Random histories: a pull that gets nothing means that nothing is there which its consumer may have."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import pytest

from qmq.broker.ports.effects import PulledMessages
from qmq.net.protocol.types import Disposition
from tests.broker.delivery.order.slots import Keys, Session, numbers_of, texts

KEYS = ("k", "l", "m", "n", "o", "p", "low", "normal", "high")


class Left:
    """The messages of a group that are not settled, and those that consumers have."""

    def __init__(self) -> None:
        self.left = dict[str, None]()
        self.in_hand: dict[str, dict[int, str]] = defaultdict(dict)

    def given(self, name: str, answer: PulledMessages) -> list[str]:
        found = texts(answer)
        self.in_hand[name].update(zip(numbers_of(answer), found, strict=True))
        return found

    def settle(self, name: str, number: int) -> None:
        del self.left[self.in_hand[name].pop(number)]

    def back(self, name: str, number: int) -> None:
        """A message goes back, and what its consumer has behind it in its slot."""
        key, place = self.in_hand[name].pop(number).split()
        if len(key) > 1:
            return
        for other, body in list(self.in_hand[name].items()):
            if body.split()[0] == key and int(body.split()[1]) > int(place):
                del self.in_hand[name][other]

    def may_have(self, name: str) -> list[str]:
        """Return the messages that a consumer may have now."""
        taken = {body for mine in self.in_hand.values() for body in mine.values()}
        others = {
            body.split()[0] for other, mine in self.in_hand.items() if other != name for body in mine.values()
        }  # fmt: skip
        return [
            body for body in self.left
            if body not in taken and (len(body.split()[0]) > 1 or body.split()[0] not in others)
        ]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_nothing_means_that_nothing_is_there(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmq.broker.delivery.order.scan.MOST_PASSED", 5)
    chance, driven, model = random.Random(seed), Keys(tmp_path, partitions=1 + seed % 2), Left()
    settings = {"max_attempts": 100, "tags": ("eu",), "priority_share": chance.choice((0, 0.1, 1))}
    sessions: list[Session] = [driven.join(name, **settings) for name in ("one", "two", "three")]
    for _ in range(120):
        luck, at = chance.random(), chance.randrange(3)
        who = sessions[at]
        mine = model.in_hand[who.name]
        if luck < 0.3:
            tag = chance.choice(("eu", "us"))
            sent = driven.put(*chance.choices(KEYS, k=chance.choice((1, 3, 6))), tags=(tag,))
            model.left.update(dict.fromkeys(sent) if tag == "eu" else {})
        elif luck < 0.55 and mine:
            number = chance.choice(list(mine))
            driven.ack(who, number)
            model.settle(who.name, number)
        elif luck < 0.65 and mine:
            number = chance.choice(list(mine))
            driven.back(who, number, chance.choice((Disposition.NACK, Disposition.RELEASE)), 0)
            model.back(who.name, number)
        elif luck < 0.68:
            (driven.restart if chance.random() < 0.5 else driven.kill)()
            sessions = driven.rejoin(*sessions)
        else:
            there = model.may_have(who.name)
            found = model.given(who.name, driven.take(who, chance.choice((1, 2, 50))))
            assert set(found) <= set(there)
            assert bool(found) == bool(there), f"{who.name} got none of {there}"
        driven.alive(*sessions)
    for who in sessions:
        for number in sorted(model.in_hand[who.name]):
            driven.ack(who, number)
            model.settle(who.name, number)
    assert set(driven.drain(*sessions)) == set(model.left)
    driven.close()
