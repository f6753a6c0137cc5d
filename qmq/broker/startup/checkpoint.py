"""What a checkpoint keeps of the broker, when it makes no sense: it fits its checksum, and no broker has written it so.

Such a checkpoint is worth no more than a rotten one: the start goes by the one before.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack

from qmq.errors import BadBytes

#: What is raised by code that takes over something else than it once gave.
_SENSELESS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    msgpack.UnpackException,
    struct.error,
    zlib.error,
)


class BadState(BadBytes):
    """What a checkpoint keeps of the broker makes no sense."""

    code = "bad_state"

    #: The checkpoint.
    path: Path | None = None


@contextmanager
def rejecting_bad_state(path: Path | None) -> Iterator[None]:
    """What the checkpoint at *path* says is being taken over. Raises BadState where it makes no sense; without a
    checkpoint whatever is raised passes.
    """
    try:
        yield
    except _SENSELESS as error:
        if path is None:
            raise
        bad = BadState(
            f"{path} fits its checksum, but what it keeps of groups or producers makes no sense ({error!r:.200}); the "
            "checkpoint before is used instead, or the whole log"
        )
        bad.path = path
        raise bad from error
