"""The socket in a data directory at which a broker says that it is there: for probes on its machine.

A probe of a container or of Kubernetes has no certificate, no token, and not the name that the broker's certificate is
for. So the broker answers at a Unix socket, too: whoever connects gets one line and the end. The broker acts on nothing
that is sent there. Only the user of the broker and root may connect.
"""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from qmq.names import PING_NAME
from qmq.ownership import give_name

#: The longest path of a socket, in bytes.
_MOST_PATH: Final = 107
_MOST_ANSWER: Final = 4_096
_BACKLOG: Final = 16


def bind(directory: Path) -> socket.socket:
    """Return a listening socket in a data directory that the caller has locked: one that is there is of a broker that
    was killed. Raises OSError.
    """
    with _in_directory(directory) as (descriptor, address):
        remove(directory)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(sock.fileno(), 0o600)  # which its name gets, from its first moment on
            sock.bind(address)
            give_name(PING_NAME, descriptor)
            sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            raise
        return sock


def remove(directory: Path) -> None:
    """Remove the socket of a data directory that the caller has locked; leave anything else of that name."""
    path = directory / PING_NAME
    with suppress(OSError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()


def answer(version: str) -> bytes:
    """Return what a broker of this version says."""
    return json.dumps({"version": version}).encode() + b"\n"


def ask(directory: Path, timeout_s: float) -> str:
    """Return the version of the broker that serves a data directory. Raises OSError, and ValueError for a strange
    answer.
    """
    with _in_directory(directory) as (_, address), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout_s)
        sock.connect(address)
        received = b""
        while not received.endswith(b"\n") and len(received) < _MOST_ANSWER and (part := sock.recv(_MOST_ANSWER)):
            received += part
    if not received:
        raise ConnectionResetError
    version = json.loads(received)["version"] if received.startswith(b"{") else None
    if not isinstance(version, str):
        raise ValueError("the answer has no version")
    return version


@contextmanager
def _in_directory(directory: Path) -> Iterator[tuple[int, str]]:
    """Yield a descriptor of the directory, and the path of the socket in it: by way of the descriptor if that of the
    directory is too long for a socket.
    """
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        path = os.fspath(directory / PING_NAME)
        yield descriptor, path if len(os.fsencode(path)) <= _MOST_PATH else f"/proc/self/fd/{descriptor}/{PING_NAME}"
    finally:
        os.close(descriptor)
