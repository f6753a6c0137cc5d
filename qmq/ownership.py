"""Files and directories that root makes belong to the owner of the directory they are in.

An administrator runs `qmq repair`, `qmq tokens` or even `qmq serve` as root, and the broker, which runs as another
user, has to open what they have made. Only what is new is given away: a name that exists may be a link to elsewhere.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def open_file(path: Path, flags: int, mode: int) -> int:
    """Open a file as ``os.open`` does; one that is made by it belongs to the owner of its directory."""
    if flags & os.O_CREAT and os.geteuid() == 0:
        with suppress(FileExistsError):
            fd = os.open(path, flags | os.O_EXCL, mode)
            give(fd, path.parent)
            return fd
    return os.open(path, flags, mode)


def mkdir(path: Path, mode: int) -> None:
    """Make a directory as ``os.mkdir`` does, for the owner of the one above."""
    os.mkdir(path, mode)
    if os.geteuid() == 0:
        with suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                give(fd, path.parent)
            finally:
                os.close(fd)


def give(fd: int, directory: Path) -> None:
    """As root, give a new file or directory to the owner of *directory*, where the system allows it."""
    if os.geteuid() == 0:
        with suppress(OSError):  # root of a container may lack the right, or the owner have no name there
            owner = os.stat(directory)
            os.fchown(fd, owner.st_uid, owner.st_gid)


def give_name(name: str, directory: int) -> None:
    """As root, give what has this name to the owner of the directory, an open descriptor: for what cannot be opened."""
    if os.geteuid() == 0:
        with suppress(OSError):
            owner = os.fstat(directory)
            os.chown(name, owner.st_uid, owner.st_gid, dir_fd=directory, follow_symlinks=False)
