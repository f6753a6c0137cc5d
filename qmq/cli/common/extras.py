"""Commands that need the packages of an extra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from qmq.errors import MissingExtra


@contextmanager
def needing_extra(extra: str, what: str) -> Iterator[None]:
    """Say how to install *extra* where an import in this block finds no package. *what* needs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "qmq":
            raise
        raise MissingExtra(f"{what} needs {error.name}: pip install 'qmq[{extra}]'") from error
