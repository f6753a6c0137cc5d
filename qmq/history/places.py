"""Where archives are: what a place that a user names means, a path or file://."""

from __future__ import annotations

from qmq.errors import InvalidOption
from qmq.history.files import LocalFiles, local_path


def files_at(place: str) -> LocalFiles:
    """The tree there. Raises InvalidOption."""
    path = local_path(place)
    if path is None:
        raise InvalidOption(f"{place} is no place that is known; give a path of this machine, or a file:// URL")
    return LocalFiles(path.absolute())
