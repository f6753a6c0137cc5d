"""Find keys, order keys, tags and properties in the headers of many messages at once, by numpy.

A header is a msgpack map of ``"k"``: list of keys, ``"o"``: list of one order key, ``"t"``: list of tags, ``"p"``: map
of properties, all of it text.
All headers are walked side by side, one text a step: there are as many steps as the longest header has texts. Headers
with other contents (later fields, other forms) are left to ``read_header``, one by one.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

KEYS: Final = 0
ORDER_KEYS: Final = 1
TAGS: Final = 2
PROPERTIES: Final = 3

_FIXMAP: Final = 0x80
_LETTERS: Final = np.full(256, -1, np.int64)
_LETTERS[[ord("k"), ord("o"), ord("t"), ord("p")]] = KEYS, ORDER_KEYS, TAGS, PROPERTIES
_NO_INTS: Final = np.empty(0, np.int64)


class Texts(NamedTuple):
    """The texts of one field: the message of each (ascending), and its range in the window. Properties: name, value,
    ...
    """

    message: Ints
    start: Ints
    end: Ints


class Walked(NamedTuple):
    """The texts by KEYS, ORDER_KEYS, TAGS and PROPERTIES; ``odd`` are messages whose headers must be decoded one by
    one.
    """

    fields: tuple[Texts, Texts, Texts, Texts]
    odd: Ints


class _Walk:
    def __init__(self, window: memoryview, starts: Ints, ends: Ints) -> None:
        self.raw = np.frombuffer(window, np.uint8)
        self.at = starts.copy()
        self.ends = ends
        self.odd = np.zeros(len(starts), np.bool_)
        self.found: tuple[list[tuple[Ints, Ints, Ints]], ...] = ([], [], [], [])

    def byte(self, who: Ints, ahead: int = 0) -> Ints:
        """Return the byte *ahead* of the offset of each message; messages whose headers end before it become odd."""
        places = self.at[who] + ahead
        over = places >= self.ends[who]
        self.odd[who[over]] = True
        places[over] = 0
        return self.raw[places].astype(np.int64)

    def number(self, who: Ints, size: int) -> Ints:
        """Return the big-endian number of *size* bytes after the first byte."""
        value = np.zeros(len(who), np.int64)
        for ahead in range(1, size + 1):
            value = (value << 8) | self.byte(who, ahead)
        return value

    def counts(self, who: Ints, short: int, long: int) -> Ints:
        """Return how many elements the list or map at the offset has, and step over its head.

        *short* is the first byte of short ones, *long* that of those with a u16.
        """
        first = self.byte(who)
        value = first - short
        is_long = first == long
        value[is_long] = self.number(who[is_long], 2)
        self.at[who] += np.where(is_long, 3, 1)
        wrong = (~is_long & ((first < short) | (first >= short + 16))) | (value == 0)
        self.odd[who[wrong]] = True
        value[wrong] = 0
        return value

    def text(self, who: Ints) -> tuple[Ints, Ints]:
        """Return the range of the text at the offset of each message, and step over it."""
        first = self.byte(who)
        size = first - 0xA0
        head = np.ones(len(who), np.int64)
        wrong = (first < 0xA0) | (first > 0xBF)
        for code, width in ((0xD9, 1), (0xDA, 2)):
            such = first == code
            if such.any():
                size[such] = self.number(who[such], width)
                head[such] = 1 + width
                wrong[such] = False
        start = self.at[who] + head
        end = start + size
        wrong |= end > self.ends[who]
        self.odd[who[wrong]] = True
        self.at[who] = np.where(wrong, self.at[who], end)
        return start, np.where(wrong, start, end)

    def texts(self, who: Ints, field: int, counts: Ints) -> None:
        """Walk *counts* texts of each message, step by step."""
        left = counts
        while len(who):
            kept = (left > 0) & ~self.odd[who]
            who, left = who[kept], left[kept]
            if len(who):
                start, end = self.text(who)
                self.found[field].append((who, start, end))
                left = left - 1

    def fields(self, who: Ints, fields: Ints) -> None:
        """Walk *fields* fields of each message."""
        seen = np.full(len(self.at), -1, np.int64)
        for number in range(int(fields.max(initial=0))):
            now = who[(fields > number) & ~self.odd[who]]
            named = self.byte(now) == 0xA1
            field = np.where(named, _LETTERS[self.byte(now, 1)], -1)
            wrong = (field < 0) | (field <= seen[now])  # fields come in this order
            self.odd[now[wrong]] = True
            now, field = now[~wrong], field[~wrong]
            seen[now] = field
            self.at[now] += 2
            for which in (KEYS, ORDER_KEYS, TAGS):
                such = now[field == which]
                self.texts(such, which, self.counts(such, 0x90, 0xDC))
            such = now[field == PROPERTIES]
            self.texts(such, PROPERTIES, 2 * self.counts(such, _FIXMAP, 0xDE))


def walk(window: memoryview, starts: Ints, ends: Ints) -> Walked:
    """Return the texts in headers, whose ranges in the window are int64[n]; empty headers have none."""
    state = _Walk(window, starts, ends)
    who = np.flatnonzero(ends > starts)
    first = state.byte(who)
    wrong = (first <= _FIXMAP) | (first > _FIXMAP + 4)
    state.odd[who[wrong]] = True
    state.at[who] += 1
    state.fields(who[~wrong], first[~wrong] - _FIXMAP)
    whole = who[~state.odd[who]]
    state.odd[whole[state.at[whole] != ends[whole]]] = True
    fields = [_joined(found, state.odd) for found in state.found]
    return Walked((fields[0], fields[1], fields[2], fields[3]), np.flatnonzero(state.odd))


def _joined(found: list[tuple[Ints, Ints, Ints]], odd: npt.NDArray[Any]) -> Texts:
    """Return the texts by message, in the order in which they stand in it."""
    if not found:
        return Texts(_NO_INTS, _NO_INTS, _NO_INTS)
    message, start, end = (np.concatenate(columns) for columns in zip(*found, strict=True))
    kept = ~odd[message]
    message, start, end = message[kept], start[kept], end[kept]
    if len(found) > 1:
        order = np.argsort(message, kind="stable")
        message, start, end = message[order], start[order], end[order]
    return Texts(message, start, end)
