"""Reject a checkpoint whose state of the broker makes no sense, though it fits its checksum.

No broker has written such a state; like a damaged checkpoint, it makes the start use the checkpoint before.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack

from qmq.errors import BadBytes

#: The errors of restoring a state that no broker wrote.
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
    """The state of the broker in a checkpoint makes no sense."""

    code = "bad_state"

    #: The path of the checkpoint.
    path: Path | None = None


@contextmanager
def rejecting_bad_state(path: Path | None) -> Iterator[None]:
    """Within this context, errors from restoring the checkpoint at *path* become BadState; without a checkpoint they
    pass.
    """
    try:
        yield
    except _SENSELESS as error:
        if path is None:
            raise
        bad = BadState(
            f"{path} fits its checksum, but its state of groups or producers makes no sense ({error!r:.200}); the "
            "checkpoint before is used instead, or the whole log"
        )
        bad.path = path
        raise bad from error
