"""The safeguards of several keys a message, and of where messages come from."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import instead, never, skip

_KEYS: Final = ("tests/format/test_keys.py",)
_SOURCES: Final = ("tests/format/test_source.py", "tests/broker/publish/test_sources.py")

OF_SOURCES: Final = (
    Mutant(
        "say that messages have several keys",
        "format/build:_columns_of",
        never("any(more_keys)"),
        _KEYS,
    ),
    Mutant(
        "say so of messages that fall due together",
        "join_singles",
        never("any(one.flags & HAS_MORE_KEYS for one in singles)"),
        _KEYS,
    ),
    Mutant(
        "bound the keys of a header of another client",
        "_keys_in",
        instead("keys[:MAX_KEYS]", "keys"),
        _KEYS,
    ),
    Mutant(
        "refuse an address that a client states",
        "check_sent",
        never("port or any(address) or any(source[_RECORD.size : _RECORD.size + sender_size])"),
        _SOURCES,
    ),
    Mutant(
        "keep the source of each sender when messages fall due together",
        "join_singles",
        never("len(sources) > 1"),
        _SOURCES,
    ),
    Mutant(
        "keep the producer of the original in a copy",
        "with_producer",
        instead(
            "source[:_PRODUCER_SIZE_OFFSET] + size + source[_PRODUCER_SIZE_OFFSET + 1 :] + producer_id",
            "source",
        ),
        _SOURCES,
    ),
    Mutant(
        "refuse a batch that has no room for its sender",
        "Intake._source_of",
        never("not has_room(view, BATCH_HEADER_SIZE + RUN_SIZE * runs, source)"),
        _SOURCES,
    ),
    Mutant(
        "forget the source of a connection that is gone",
        "Intake.disconnected",
        skip("self._sources.pop(connection, None)"),
        _SOURCES,
    ),
)
