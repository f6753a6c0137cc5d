"""The safeguards of traces and of the kept pull log: with one switched off a test must fail."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import instead, never, skip

_KEPT: Final = ("tests/storage/pull_log/test_kept.py",)
_TRACES: Final = ("tests/broker/find/trace/test_traces.py",)
_STATES: Final = ("tests/broker/find/trace/test_states.py",)

OF_TRACES: Final = (
    Mutant(
        "tell filtered messages from others that the same pull passed",
        "events_of",
        instead("_lacks_tags(store, group, place)", "True"),
        ("tests/broker/find/trace/test_traces.py",),
    ),
    Mutant(
        "keep files of the pull log only once no start reads them",
        "KeptPullFiles.retire",
        never("following > before"),
        _KEPT,
    ),
    Mutant(
        "bound the kept files by their bytes",
        "KeptPullFiles._remove_old",
        instead(
            "left <= self._keep.keep_bytes and now_us - end_us < self._keep.keep_us",
            "now_us - end_us < self._keep.keep_us",
        ),
        _KEPT,
    ),
    Mutant(
        "bound the kept files by the age of their last records",
        "KeptPullFiles._remove_old",
        instead(
            "left <= self._keep.keep_bytes and now_us - end_us < self._keep.keep_us", "left <= self._keep.keep_bytes"
        ),
        _KEPT,
    ),
    Mutant(
        "read kept files too",
        "PullLogScan._wanted",
        instead("list_pull_files(self._disk, self._directory, KEPT_SUFFIX)", "()"),
        _TRACES,
    ),
    Mutant(
        "pause between two steps of traces",
        "Traces.tick",
        instead("now.monotonic_us + _PAUSE_US", "now.monotonic_us"),
        _TRACES,
    ),
    Mutant(
        "bound the traces that wait",
        "Traces._add",
        never("len(self._waiting) >= MOST_WAITING or self._by_connection[command.connection] >= MOST_OF_ONE"),
        _TRACES,
    ),
    Mutant(
        "show a copy only to the group that has it",
        "MessagePlace.belongs_to",
        instead("self.is_shared or self.name == private_subject(group, self.subject)", "True"),
        _TRACES,
    ),
    Mutant(
        "take only what is still in flight for in flight",
        "GroupView._in_flight",
        instead(
            "offset is not None and member.in_flight.holds(first + offset, first + offset + 1)", "offset is not None"
        ),
        _STATES,
    ),
    Mutant(
        "call a deleted dead letter deleted",
        "with_events",
        never("deleted is not None or (found.state == 'acked' and last.kind != HANDED_OUT)"),
        _TRACES,
    ),
    Mutant(
        "take the end of a consumer for the end of all that it has",
        "RecordScan._of_ranges",
        instead("(count == 0) | (count == PULL_MANY)", "count == PULL_MANY"),
        _TRACES,
    ),
    Mutant(
        "leave out bytes that look like records within others",
        "_not_within_others",
        instead("follows | (offsets >= behind)", "follows | True"),
        _TRACES,
    ),
    Mutant(
        "keep the records behind a hole",
        "_not_within_others",
        instead("follows | (offsets >= behind)", "follows"),
        ("tests/storage/pull_log/test_scan.py", *_TRACES),
    ),
    Mutant(
        "read records of version 2 in a trace",
        "records:table_of",
        skip("table[[old for old, kind in OF_VERSION_2.items() if kind in kinds]] = True"),
        ("tests/broker/find/trace/test_old_records.py",),
    ),
    Mutant(
        "pack a range that is cut with all its fields",
        "Ledger.pulled",
        never("run or skip or len(ranges) > 1 or (end != first and (end or log >= PARTITIONS))"),
        ("tests/broker/groups/test_group_state.py",),
    ),
    Mutant("take a takeover that expires a session for an end", "RecordScan._find_joins", never("expired", 2), _TRACES),
    Mutant(
        "take a seek for an end",
        "events:_end_of",
        instead("one.position > position", "False"),
        ("tests/broker/find/trace/test_traces.py", *_STATES),
    ),
)
