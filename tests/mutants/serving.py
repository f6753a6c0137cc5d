"""Safeguards of what goes to clients, and of what their threads say."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import always, instead, never, skip

OF_ANSWERS: Final = (
    Mutant(
        "have the loop call the next turn once",
        "Server._turn_soon",
        always("not self._called"),
        ("tests/net/server/test_server.py",),
    ),
    Mutant(
        "have a large answer written piece by piece",
        "ClientConnection.write",
        never("size > PIECE_BYTES"),
        ("tests/net/server/test_write_queue.py",),
    ),
    Mutant(
        "have the last word come behind the rest of an answer",
        "ClientConnection.end",
        never("(size := self._unsent.size)"),
        ("tests/net/server/test_write_queue.py",),
    ),
    Mutant(
        "leave no acknowledgement of a thread behind",
        "ThreadDispositions._take",
        skip("self.is_due = False"),
        ("tests/net/client/consumer/test_acks.py",),
    ),
    Mutant(
        "take no flipped bit for another durability",
        "decode_request",
        instead("frame.flags not in (0, frames.FLUSH)", "frame.flags & ~frames.FLUSH"),
        ("tests/net/server/test_flipped_headers.py",),
    ),
    Mutant(
        "call no run decodable for one of its headers",
        "are_decodable",
        instead("np.logical_and.reduceat(fits, firsts)", "np.logical_or.reduceat(fits, firsts)"),
        ("tests/format/test_run.py",),
    ),
    Mutant(
        "look into no bytes behind an answer",
        "_have_only_keys",
        instead("starts + sizes <= len(payload)", "starts == starts"),
        ("tests/format/test_run.py",),
    ),
)

_RUN: Final = ("tests/net/client/consumer/test_run.py",)
_INFO: Final = ("tests/daemon/test_info.py",)
_SYSTEMD: Final = ("tests/daemon/test_systemd.py",)
_LOGS: Final = ("tests/test_logs.py",)
_OWNERS: Final = ("tests/test_ownership.py",)  # as root
_SIGNALS: Final = ("tests/cli/common/test_signals.py",)
_PING: Final = ("tests/cli/manage/test_ping.py",)
_UNTAKEN: Final = ("tests/broker/groups/test_untaken.py",)

OF_OPERATION: Final = (
    Mutant(
        "release the message of a handler that is cancelled",
        "run:_Worker._cancelled",
        skip("self.message.release()"),
        _RUN,
    ),
    Mutant(
        "name a disk that does not answer",
        "_disk_problems",
        never("free is None or total is None"),
        _INFO,
    ),
    Mutant(
        "call a disk full where sends are refused",
        "_disk_problems",
        instead("free <= reserved", "free < 0"),
        _INFO,
    ),
    Mutant(
        "warn of an address that others reach",
        "_address_problems",
        never("not is_local"),
        _INFO,
    ),
    Mutant(
        "keep the variables of systemd from child processes",
        "ServiceManager.__init__",
        instead('environment.pop("NOTIFY_SOCKET", "")', 'environment.get("NOTIFY_SOCKET", "")'),
        _SYSTEMD,
    ),
    Mutant(
        "feed only the watchdog of this process",
        "ServiceManager.__init__",
        instead('process in ("", str(os.getpid()))', "True"),
        _SYSTEMD,
    ),
    Mutant(
        "keep no more lines of the log than there is room for",
        "StderrHandler.emit",
        never("self._bytes + len(line) > self._most_bytes"),
        _LOGS,
    ),
    Mutant(
        "say how many lines of the log were dropped before the next one",
        "StderrHandler.emit",
        never("bool(self._dropped) and not self._has_failed"),
        _LOGS,
    ),
    Mutant(
        "print no reason for the end where nobody reads",
        "_print_error",
        never("not can_print(sys.stderr, MOMENT_S)"),
        ("tests/cli/common/test_standard_streams.py",),
    ),
    Mutant(
        "give a file that root makes to the owner of its directory",
        "open_file",
        skip("give(fd, path.parent)"),
        _OWNERS,
    ),
    Mutant(
        "give no file away that was there before",
        "open_file",
        instead("flags | os.O_EXCL", "flags"),
        _OWNERS,
    ),
    Mutant(
        "have a signal end the first process of a container while it is loaded",
        "ending_at_once",
        never("os.getpid() == 1"),
        _SIGNALS,
    ),
    Mutant(
        "have a signal end the first process of a container from its start on",
        "end_first_process",
        skip("signal.signal(signal.SIGTERM, _end)"),
        _SIGNALS,
    ),
    Mutant(
        "let nobody but the user of the broker ask at its socket",
        "ping_socket:bind",
        skip("os.fchmod(sock.fileno(), 0o600)"),
        _PING,
    ),
    Mutant(
        "take the place of a socket that a killed broker has left",
        "ping_socket:bind",
        skip("remove(directory)"),
        _PING,
    ),
    Mutant(
        "pack a group again that has changed since the preparation",
        "Subscriptions.packed",
        never("group.dirty or (ledger := group.ledger) is None or ledger.changed or ledger.retries.changed"),
        ("tests/broker/startup/test_checkpoint.py",),
    ),
    Mutant(
        "freeze what a long collection leaves",
        "CollectorBound.heard",
        skip("self._freeze()"),
        ("tests/daemon/test_collector.py",),
    ),
    Mutant(
        "read the rows since a start once for all groups",
        "lag:_cursors",
        never("known is not None"),
        ("tests/broker/test_admin_turns.py",),
    ),
    Mutant(
        "report a name that nobody takes once",
        "UntakenNames.look",
        always("(code, name) not in self._known"),
        _UNTAKEN,
    ),
    Mutant(
        "give a prefix an hour to be taken",
        "UntakenNames._untaken_prefixes",
        never("now_us - since_us < UNTAKEN_US or counted == _MOST_COUNTED"),
        _UNTAKEN,
    ),
)
