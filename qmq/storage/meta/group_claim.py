"""What a checkpoint says of the files of groups: how far the pull log is in it, and which runs it knows."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgpack

from qmq.errors import BadBytes

#: The directory of what each group has.
GROUPS_NAME: Final = "groups"
#: The delay log, and when what is in it falls due.
DELAYED_NAME: Final = "delayed"
DUE_NAME: Final = "due"
#: The name of this in a checkpoint's state.
GROUP_STATE: Final = "group_files"


class Runs(NamedTuple):
    """The runs of one directory: how many items each has, by number, and how long an item is."""

    item_size: int
    items: dict[int, int]


class GroupClaim(NamedTuple):
    """Everything before ``position`` of the pull log is in the checkpoint, and all before ``synced`` on disk: not
    the same after a sync that failed. ``runs`` go by their directories, relative to that of the store. ``generation``
    is that of the pull log.
    """

    position: int = 0
    synced: int = 0
    generation: int = 1
    runs: dict[str, Runs] = {}  # noqa: RUF012  (never changed)

    def pack(self) -> bytes:
        """As bytes of the state."""
        runs = {name: [size, items] for name, (size, items) in self.runs.items()}
        packed: bytes = msgpack.packb([self.position, self.synced, self.generation, runs])
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> GroupClaim:
        """What ``pack`` gave. Raises BadBytes."""
        try:
            position, synced, generation, runs = msgpack.unpackb(packed, strict_map_key=False)
            found = {_text(name): Runs(_count(size), _counts(items)) for name, (size, items) in runs.items()}
            return cls(_count(position), _count(synced), _count(generation), found)
        except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
            raise BadBytes(f"what a checkpoint says of the files of groups makes no sense: {error}") from error


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def _counts(values: Any) -> dict[int, int]:
    return {_count(number): _count(items) for number, items in values.items()}


def _text(value: Any) -> str:
    if type(value) is not str or value.startswith("/") or ".." in value:
        raise ValueError(f"{value!r:.40} is no directory of a store")
    return value
