"""The traffic of a soak: every property of a message follows from its number and the soak's seed.

So senders, consumers and the check at the end agree on tens of millions of messages, and none of them keeps one.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qmq.net.client.options import Durability

#: Numbers of one block are sent in one go: one by one, or by one `send_many` to one subject.
BLOCK: Final = 16
SUBJECTS: Final = (
    "soak.order.created",
    "soak.order.paid",
    "soak.stock",
    "soak.mail",
    "soak.news",
    "soak.slow",
)
#: How many of 64 messages go to each.
_WEIGHTS: Final = (20, 16, 12, 12, 2, 2)
_SUBJECT_OF: Final = np.repeat(np.arange(len(SUBJECTS), dtype=np.uint8), _WEIGHTS)
_SUBJECT_LIST: Final = _SUBJECT_OF.tolist()
TAG: Final = "red"
DELAYS: Final = (0.2, 1.0, 3.0)
EXPIRY: Final = 2.0
_SIZES: Final = (24, 100, 100, 300, 300, 300, 1_000, 4_000)
#: Bytes of a message on disk, about: bodies, headers, columns and runs.
MEAN_BYTES: Final = 850
_NUMBER: Final = struct.Struct(">Q")
_PADDING: Final = bytes(range(256)) * (max(_SIZES) // 256 + 1)
_MASK: Final = (1 << 64) - 1


@dataclass(frozen=True)
class Group:
    """A group of the soak: what it follows, and the names of its rows in the ledger (one, but for a broadcast)."""

    name: str
    prefixes: tuple[str, ...]
    rows: tuple[str, ...]
    tags: tuple[str, ...] = ()

    def follows(self, subject: str) -> bool:
        """Whether it gets the messages of *subject*, of its tags."""
        return any(subject == one or (one.endswith(".") and subject.startswith(one)) for one in self.prefixes)

    @property
    def share(self) -> float:
        """The share of all messages that are in what it follows, whatever their tags."""
        weights = [weight for subject, weight in zip(SUBJECTS, _WEIGHTS, strict=True) if self.follows(subject)]
        return sum(weights) / sum(_WEIGHTS)


GROUPS: Final = (
    Group("billing", ("soak.order.created", "soak.order.paid"), ("billing",)),
    Group("shipping", ("soak.order.", "soak.stock"), ("shipping",)),
    Group("audit", ("soak.slow",), ("audit",)),
    Group("mail", ("soak.mail",), ("mail",), (TAG,)),
    Group("copy", ("soak.",), ("copy",)),
    Group("news", ("soak.news",), ("news@one", "news@two")),
)


NAMED: Final = {group.name: group for group in GROUPS}


class Planned(NamedTuple):
    """One message, as it is to be sent. ``delay`` and ``expire`` are 0 where it has none."""

    subject: str
    body: bytes
    key: str | None
    tags: tuple[str, ...]
    delay: float
    expire: float
    durability: Durability


class Plan:
    """What is sent under which number."""

    def __init__(self, seed: int) -> None:
        self._salt = seed * 0x9E37_79B9_7F4A_7C15 & _MASK

    def is_many(self, block: int) -> bool:
        """Whether that block is one `send_many`."""
        return bool(self._is_many(self._mixed(block + (1 << 60))))

    def message(self, number: int) -> Planned:
        """The message of that number."""
        bits, of_block = self._bits(number)
        is_many = self._is_many(of_block)
        subject = SUBJECTS[_SUBJECT_LIST[(of_block if is_many else bits) & 63]]
        durability: Durability = "append" if (of_block >> 6) & 1 else "flush"
        size = _SIZES[(bits >> 8) & 7]
        body = _NUMBER.pack(number) + _PADDING[number & 255 : (number & 255) + size - _NUMBER.size]
        if is_many:
            return Planned(subject, body, None, (), 0.0, 0.0, durability)
        key = f"order-{(bits >> 20) & 1023}" if (bits >> 11) & 1 else None
        tags = (TAG,) if self._is_tagged(bits) else ("blue",) if (bits >> 13) & 1 else ()
        delay = DELAYS[(bits >> 30) % len(DELAYS)] if (bits >> 16) & 15 == 0 else 0.0
        expire = EXPIRY if self._expires(bits) else 0.0
        return Planned(subject, body, key, tags, delay, expire, durability)

    def number_of(self, body: bytes) -> int:
        """The number that a body begins with. Raises struct.error for one that has none."""
        return int(_NUMBER.unpack_from(body)[0])

    def is_poison(self, number: int) -> bool:
        """Whether its handlers nearly always fail."""
        return bool((self._mixed(number) >> 50) & 1023 == 0)

    def is_for(self, group: Group, numbers: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which of the messages *group* gets."""
        bits, of_block = self._bits(numbers)
        is_many = self._is_many(of_block)
        subjects = _SUBJECT_OF[(np.where(is_many, of_block, bits) & 63).astype(np.intp)]
        chosen: NDArray[np.bool_] = np.array([group.follows(subject) for subject in SUBJECTS])[subjects]
        if group.tags:
            chosen &= self._is_tagged(bits) & ~is_many
        return chosen

    def expires(self, numbers: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which of the messages have an expiry."""
        bits, of_block = self._bits(numbers)
        chosen: NDArray[np.bool_] = self._expires(bits) & ~self._is_many(of_block)
        return chosen

    # The arithmetic below is the same for an int and for an array of uint64.

    def _bits(self, number: Any) -> tuple[Any, Any]:
        """64 bits for each message, and 64 for its block."""
        return self._mixed(number), self._mixed((number >> 4) + (1 << 60))

    def _mixed(self, number: Any) -> Any:
        bits = (number ^ self._salt) & _MASK
        bits = ((bits ^ (bits >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
        bits = ((bits ^ (bits >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
        return bits ^ (bits >> 31)

    def _is_many(self, of_block: Any) -> Any:
        return (of_block >> 7) & 3 == 0

    def _is_tagged(self, bits: Any) -> Any:
        return (bits >> 12) & 1 == 1

    def _expires(self, bits: Any) -> Any:
        return (bits >> 24) & 63 == 0
