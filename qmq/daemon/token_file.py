"""Watches the file of tokens, has the server take its changes, and notes when each token was last used."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from qmq.broker.ports.rights import Rights
from qmq.daemon.threads import CallThread
from qmq.errors import InvalidOption, QmqError
from qmq.net.server import Server
from qmq.net.server.login.logins import Token
from qmq.settings import Settings
from qmq.tokens import TOKENS_NAME, USED_NAME, Tokens, read_tokens, write_used

log = logging.getLogger("qmq.broker")

#: Seconds between two looks at the file: a change counts within a second.
LOOK_S: Final = 0.5
#: Looks between two writes of the times of use.
_LOOKS_A_WRITE: Final = 120


class TokenFileState(NamedTuple):
    """A state of the file: another one means that its content may differ."""

    device: int
    inode: int
    size: int
    modified_ns: int


class ReadTokens(NamedTuple):
    """The tokens of a file in one state of it; None where there is no file."""

    state: TokenFileState | None
    tokens: Mapping[str, Token] | None


def path_of(settings: Settings) -> Path:
    """Return the path of the file of tokens."""
    return settings.tokens_file or settings.data_dir / TOKENS_NAME


def read_at_start(settings: Settings, hosts: Iterable[str]) -> ReadTokens:
    """Return the tokens with which a broker that listens on *hosts* starts.

    Raises InvalidOption when the file has a fault, or is missing although the broker needs it.
    """
    path = path_of(settings)
    try:
        found = _read(path)
    except OSError as error:
        raise InvalidOption(f"the tokens in {path} cannot be read: {error.strerror}; make the file readable") from None
    if found.tokens is not None:
        return found
    if settings.tokens_file is not None:
        raise InvalidOption(
            f"tokens_file {path} does not exist; make it with `qmq tokens create NAME --admin --tokens-file {path}`"
        )
    open_hosts = [host for host in hosts if not is_loopback(host)]
    if open_hosts and not settings.insecure:
        raise InvalidOption(
            f"listen = {settings.listen} lets in whoever reaches this machine, and there are no tokens in {path}; make "
            f"one with `qmq tokens create NAME --admin --data-dir {settings.data_dir}`, or listen on 127.0.0.1, or set "
            "insecure = true if everyone there may do everything"
        )
    return found


def is_loopback(host: str) -> bool:
    """Return whether an IP address is reached from its own machine only."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _read(path: Path) -> ReadTokens:
    """Return the tokens of a file. Raises InvalidOption and OSError."""
    state = _state_of(path)
    if state is None:
        return ReadTokens(None, None)
    return ReadTokens(state, rules_of(read_tokens(path)))


def _state_of(path: Path) -> TokenFileState | None:
    try:
        state = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return TokenFileState(state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)


def rules_of(tokens: Tokens) -> dict[str, Token]:
    """Return the tokens of a file as the server takes them."""
    return {
        name: Token(
            Rights(name, entry.produce, entry.consume, entry.group, entry.browse, is_admin=entry.admin),
            entry.digests,
            entry.expires_us,
        )
        for name, entry in tokens.items()
    }


class TokenFile:
    """Looks at the file of tokens again and again, in a thread. Call ``start`` once the server serves."""

    def __init__(
        self,
        settings: Settings,
        server: Server,
        read: ReadTokens,
        loop: asyncio.AbstractEventLoop | None = None,
        worker: CallThread | None = None,
    ) -> None:
        """*read* is what the broker has started with; *loop* and *worker* are the running loop and a thread."""
        self._path = path_of(settings)
        self._used_path = settings.data_dir / USED_NAME
        self._server = server
        self._state = read.state
        self._has_tokens = read.tokens is not None
        self._told = ""  # the fault of the file that was logged last
        self._looks = 0
        self._written: dict[str, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_reading = False  # whether the thread owes an answer
        self._loop = asyncio.get_running_loop() if loop is None else loop
        self._worker = CallThread("qmq-tokens") if worker is None else worker
        if read.tokens is not None:
            server.set_tokens(read.tokens)

    def start(self) -> None:
        """Look at the file now, and every LOOK_S from now on."""
        # The timer waits for no thread: tokens expire also while the disk of the file hangs.
        self._timer = self._loop.call_later(LOOK_S, self.start)
        self._server.look_at_logins()
        if not self._is_reading:
            self._read_file()

    def _read_file(self) -> None:
        """Have the thread write the times of use, and read the file if it has changed."""
        self._is_reading = True
        found: list[ReadTokens] = []
        used = self._times_of_use()

        def look() -> None:
            if used is not None:
                write_used(self._used_path, used)
            try:
                if _state_of(self._path) != self._state:
                    found.append(_read(self._path))
            except OSError as error:
                raise InvalidOption(f"{self._path} cannot be read: {error.strerror}") from None

        def done(error: QmqError | None) -> None:
            self._is_reading = False
            if error is not None:
                self._tell(f"the tokens stay as they are: {error}")
            elif found:
                self._take(found[0])

        self._worker.call(look, done)

    def close(self) -> None:
        """Look no more; write when the tokens were last used."""
        if self._timer is not None:
            self._timer.cancel()
        self._worker.stop(LOOK_S)
        self._looks = 0
        used = self._times_of_use()
        if used is not None and not self._worker.is_running:
            write_used(self._used_path, used)

    def _take(self, read: ReadTokens) -> None:
        if read.tokens is None:
            if self._has_tokens:
                self._tell(f"{self._path} is gone, and the tokens stay as they are: put the file back")
            return
        if not read.tokens and self._has_tokens:  # an editor may be writing it just now
            self._tell(f"{self._path} has no token, and the tokens stay as they are: at least one has to stay")
            return
        self._told = ""
        self._state, self._has_tokens = read.state, True
        self._server.set_tokens(read.tokens)
        log.info("%d tokens from %s", len(read.tokens), self._path)

    def _tell(self, text: str) -> None:
        if text != self._told:
            self._told = text
            log.error("%s", text)

    def _times_of_use(self) -> dict[str, int] | None:
        """End the connections whose tokens have expired; return when each was last used, if that is to be written."""
        used = self._server.look_at_logins()
        self._looks -= 1
        if self._looks > 0 or not self._has_tokens:
            return None
        self._looks = _LOOKS_A_WRITE
        now_us = int(datetime.now(UTC).timestamp() * 1_000_000)
        used.update(dict.fromkeys(self._server.tokens_in_use(), now_us))
        if used == self._written:
            return None
        self._written = dict(used)
        return dict(used)
