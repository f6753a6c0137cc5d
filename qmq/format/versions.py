"""The refusal of files and records whose version this program does not know."""

from __future__ import annotations

from typing import Final

from qmq.errors import ForeignFile

_ADVICE: Final = {True: "use a newer one", False: "use the older one that wrote it, or begin anew"}


def check_version(name: object, version: int, newest: int, oldest: int = 1) -> None:
    """Raise ForeignFile unless this program reads *version* of the format of the file *name*: it reads those from
    *oldest* to *newest*, and writes the newest.
    """
    if not oldest <= version <= newest:
        known = str(newest) if oldest == newest else f"{oldest} to {newest}"
        raise ForeignFile(f"{name} has format version {version}; this QMQ reads {known}: {_ADVICE[version > newest]}")
