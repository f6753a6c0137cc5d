"""Random histories: a pull that gets nothing means that nothing is there which its consumer may have."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import pytest

from qmq.broker.ports.effects import PulledMessages
from qmq.format.lanes import ORDERED_KINDS
from qmq.format.layout import LANE_ORDERED
from qmq.names import takes
from qmq.net.protocol.types import Disposition
from tests.broker.delivery.order.slots import Keys, Session, numbers_of, texts
from tests.broker.delivery.order.test_order import FOLLOWED, SUBJECTS

KEYS = ("k", "l", "m", "n", "o", "p", "low", "normal", "high")


class Left:
    """The messages of a group that are not settled, and those that consumers have."""

    def __init__(self, follows: dict[str, tuple[str, ...]]) -> None:
        self.follows = follows
        #: With their subjects.
        self.left = dict[str, str]()
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
        closed = {
            body.split()[0] for other, mine in self.in_hand.items() if other != name for body in mine.values()
        }  # fmt: skip
        found = list[str]()
        for body in sorted(self.left, key=lambda body: int(body.split()[1])):
            key, is_mine = body.split()[0], takes(self.follows[name], self.left[body])
            if body in taken:
                continue
            if len(key) > 1:
                found += [body] * is_mine
                continue
            if not is_mine:
                closed.add(key)  # somebody else has to take it before the others of its key
            if key not in closed:
                found.append(body)
        return found


@pytest.mark.parametrize("seed", range(8))
def test_nothing_means_that_nothing_is_there(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmq.broker.delivery.order.scan.MOST_PASSED", 5)
    chance, driven = random.Random(seed), Keys(tmp_path, partitions=1 + seed % 2)
    follows = chance.choice(FOLLOWED)
    model = Left(follows)
    settings = {"max_attempts": 100, "tags": ("eu",), "priority_share": chance.choice((0, 0.1, 1))}
    sessions: list[Session] = [driven.join(name, *prefixes, **settings) for name, prefixes in follows.items()]
    for _ in range(120):
        luck, at = chance.random(), chance.randrange(3)
        who = sessions[at]
        mine = model.in_hand[who.name]
        if luck < 0.3:
            # What nobody gets of a subject holds a slot up until a consumer of the subject has passed it.
            tag = chance.choice(("eu", "us")) if len(set(follows.values())) == 1 else "eu"
            for key in chance.choices(KEYS, k=chance.choice((1, 3, 6))):
                subject, kind = chance.choice(SUBJECTS), chance.choice(ORDERED_KINDS) if seed % 2 else LANE_ORDERED
                (body,) = driven.put(key, subject=subject, kind=kind, tags=(tag,))
                model.left.update({body: subject} if tag == "eu" else {})
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
            sessions = [one for who in sessions for one in driven.rejoin(who, prefixes=follows[who.name])]
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
