"""The safeguards of reliable consumption: with one switched off the simulation, or a smaller test, must fail."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import always, instead, never, skip

_SIMULATION: Final = "tests/sim/test_consumption.py::test_every_message_is_handled_or_dead_and_never_with_two[first]"

_LOST: Final = "tests/broker/test_lost_records.py"

_DURABLE: Final = ("tests/broker/journal/test_durable_replies.py",)

CONSUMING: Final = (
    Mutant(
        "wait for the session timeout where the broker or the network closed a connection",
        "Membership.disconnected",
        never("client is None or not by_client"),
        ("tests/broker/groups/test_membership_returning.py",),
    ),
    Mutant(
        "let a client go that has another connection",
        "ClientConnections.closed",
        never("self._counts[client]"),
        ("tests/broker/groups/test_membership_returning.py",),
    ),
    Mutant(
        "keep a client that has come back",
        "Membership.connected",
        skip("member.gone_us = 0"),
        ("tests/broker/groups/test_membership_returning.py",),
    ),
    Mutant(
        "forget pulls that are handled behind one that is not",
        "InFlight.ack",
        skip("self._forget_handled(start, end, now_us)"),
        ("tests/broker/groups/test_in_flight.py",),
    ),
    Mutant(
        "keep pulls of which a message is in flight",
        "InFlight._forget_handled",
        always("self._handled.covers(pull.first, pull.first + pull.total)"),
        ("tests/broker/groups/test_in_flight.py",),
    ),
    Mutant(
        "say that a group is there when that is on disk",
        "Subscriptions.join",
        always("group.name is None or self._durable.has(group.ticket)"),
        _DURABLE,
    ),
    Mutant(
        "have what follows in a group on disk too before another one is told that it is there",
        "Subscriptions._follow",
        skip("group.ticket = self._durable.ticket()"),
        _DURABLE,
    ),
    Mutant(
        "say that a group was changed when that is on disk",
        "CommandDispatch._do",
        always("action in LOOKS"),
        _DURABLE,
    ),
    Mutant(
        "keep no answer back for acknowledgements that may wait",
        "WriteGate.turn",
        always("all((type(effect) in _NEED_NO_RECORD for effect in self._effects))"),
        ("tests/broker/journal/test_write_gate.py",),
    ),
    Mutant(
        "hand out what has just come only where nothing lies before it",
        "PullSelection._take_exact",
        never("entry[0] > cursor"),
        ("tests/broker/delivery/test_newest_rows.py",),
    ),
    Mutant(
        "hand out of a backlog only what is in memory",
        "PullSelection._take_entry",
        always("is_sound or page_cache.has(entry[1], entry[10], self._now.monotonic_us)"),
        ("tests/broker/delivery/test_newest_rows.py",),
    ),
    Mutant(
        "check each run of a piece of several by its own checksum",
        "_read_runs_piece",
        always("crcs == wanted"),
        ("tests/format/test_pieces.py",),
    ),
    Mutant(
        "check the header of a piece of several runs",
        "_read_runs_piece",
        never("crc32c(rest[RUNS_HEADER_SIZE:start], crc32c(rest[:RUNS_CRC_OFFSET])) != header.header_crc"),
        ("tests/format/test_pieces.py",),
    ),
    Mutant(
        "count nothing that came after a record that the power took",
        "GroupFiles.__init__",
        never("lost", at=1),
        (_LOST,),
    ),
    Mutant(
        "say in the new file what of those before it does not count",
        "PullLog._begin_file",
        instead("base if self._cut is None else self._cut", "base"),
        ("tests/storage/pull_log/test_log.py", _LOST),
    ),
    Mutant(
        "have another generation on disk before anything is written behind it",
        "PullLog._begin_file",
        (instead("self._disk.fdatasync(fd)", "pass"), skip("self._disk.fsync_directory(self._directory)")),
        ("tests/storage/pull_log/test_log.py",),
    ),
    Mutant(
        "pass blocks of at_most_once groups that came after a record that the power took",
        "GroupReplay.replay",
        always("kind != RecordKind.RESERVE"),
        (_LOST,),
    ),
    Mutant(
        "read the pull log before the identity forgets that the power was lost",
        "_Opening._recover",
        (
            instead(
                "groups = self._open_groups(identity, state.pop(GROUP_STATE, None), report, identity_file.forget_boot)",
                "pass",
            ),
            instead(
                ("if identity != before or self._is_copy_behind:\n    identity_file.change(lambda _: identity)"),
                (
                    "if identity != before or self._is_copy_behind:\n"
                    "    identity_file.change(lambda _: identity)\n"
                    "groups = self._open_groups("
                    "identity, state.pop(GROUP_STATE, None), report, identity_file.forget_boot)"
                ),
            ),
        ),
        (_LOST,),
    ),
    Mutant(
        "write records before answers leave",
        "Broker.turn",
        skip("self._records.turn(now.monotonic_us)"),
        (_SIMULATION,),
    ),
    Mutant(
        "keep acknowledgements in the pull log",
        "Ledger.ack",
        skip("self._record(_ACK, [self.number, member.number, now_us, part])"),
        (_SIMULATION,),
    ),
    Mutant(
        "close who has expired",
        "Ledger._apply_leave",
        (instead("self._emptied(member)", "member.closed = why != LeaveReason.EXPIRED"), skip("member.closed = True")),
        (_SIMULATION,),
    ),
    Mutant(
        "refuse calls of an epoch that was taken over",
        "Consumers.caller",
        never("member.epoch != epoch"),
        (_SIMULATION,),
    ),
    Mutant(
        "hand out nothing again before its time",
        "Schedule.pop",
        instead("now_us", "now_us + 1000000", at=1),
        (_SIMULATION,),
    ),
    Mutant(
        "count what a consumer holds in its window",
        "Membership.offer",
        instead("most - in_flight_count", "most"),
        (_SIMULATION,),
    ),
    Mutant(
        "count attempts",
        "Returning.failed",
        instead("attempt + 1", "attempt"),
        (_SIMULATION,),
    ),
    Mutant(
        "move a group behind what the pull log says that it was given",
        "DeliveryTracker.replay",
        skip("self._replay_cursors(group, fields[5], unflat(fields[4]))"),
        (_SIMULATION,),
    ),
    Mutant(
        "keep what was acknowledged above the ack floor in the checkpoint",
        "InFlight.restored",
        skip("in_flight._handled.add(start, end)", at=1),
        (_SIMULATION,),
    ),
    Mutant(
        "keep what was handed back above the ack floor in the checkpoint",
        "InFlight.restored",
        skip("in_flight._handled.add(start, end)", at=2),
        (_SIMULATION,),
    ),
    Mutant(
        "hand out again what an expired consumer held",
        "Returning.let_go",
        skip("self.expire_session(member, end, now_us)"),
        (_SIMULATION,),
    ),
    Mutant(
        "count expired sessions of one message that is alone only",
        "Returning.expire_session",
        instead("is_single", "1"),
        ("tests/broker/groups/test_group_state.py",),
    ),
    Mutant(
        "give a message up after max_session_expiries",
        "Returning.expire_session",
        instead(
            "session_expiries >= self.settings.max_session_expiries",
            "session_expiries > self.settings.max_session_expiries",
        ),
        ("tests/broker/groups/test_group_state.py",),
    ),
    Mutant(
        "name no subject by a number that may change",
        "_keep_numbers",
        never("number is not None and number >= store.checkpoints.subjects_claimed"),
        ("tests/broker/test_consuming.py",),
    ),
    Mutant(
        "leave no subscription where a consumer is refused",
        "Subscriptions.join",
        skip("self.leave(subscription)"),
        ("tests/broker/test_consuming.py",),
    ),
)
