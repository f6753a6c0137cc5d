"""The safeguards of traces and of the kept pull log: with one switched off a test must fail."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import instead, never

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
    Mutant("take a takeover that expires a session for an end", "RecordScan._find_joins", never("expired", 2), _TRACES),
    Mutant(
        "take a seek for an end",
        "events:_end_of",
        instead("one.position > position", "False"),
        ("tests/broker/find/trace/test_traces.py", *_STATES),
    ),
)
