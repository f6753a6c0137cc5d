"""The safeguards of searches: with one switched off, a search lacks messages, shows others', or does not say so."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import instead, never, skip

_FIND: Final = "tests/broker/find/test_find.py"
_FINDER: Final = "tests/net/client/find/test_finder.py"

FINDING: Final = (
    Mutant(
        "compare the keys themselves where hashes are equal",
        "MessageMatcher.matches",
        instead("[index for index in found if self._has_key(run, index)]", "found"),
        (f"{_FIND}::test_keys_whose_hashes_collide_are_told_apart",),
    ),
    Mutant(
        "look into the headers of messages with several keys",
        "MessageMatcher.matches",
        skip("found = list(range(run.count))"),
        (f"{_FIND}::test_each_of_several_keys_finds_a_message",),
    ),
    Mutant(
        "bound the searches of a connection that wait",
        "Finds._count",
        never("self._by_connection[connection] >= MAX_WAITING"),
        (f"{_FIND}::test_waiting_searches_of_a_connection_are_bounded",),
    ),
    Mutant(
        "say that places could not be read in a search",
        "Finds._answer",
        skip("unreadable += taken.unreadable + lost"),
        ("tests/broker/find/test_get.py::test_bad_bytes_are_an_error",),
    ),
    Mutant(
        "look up no subject with thousands of slots slot by slot",
        "read_subject",
        instead("lookups > MOST_LOOKUPS", "False"),
        (f"{_FIND}::test_no_step_is_long_where_a_subject_has_many_slots",),
    ),
    Mutant(
        "show no message of a lane before older ones of another lane",
        "_rows_of_subject",
        instead("min(ends)", "max(ends)"),
        (f"{_FIND}::test_lanes_come_in_order_where_one_has_more_messages_than_others",),
    ),
    Mutant(
        "bound the rows of a step over all partitions",
        "read_chunk",
        instead("limit // len(spans)", "limit"),
        (f"{_FIND}::test_a_step_looks_at_so_many_rows_of_all_partitions",),
    ),
    Mutant(
        "refuse a search whose read has failed",
        "Finds.read_done",
        skip("self._refuse(asked.command, done.error)"),
        (f"{_FIND}::test_a_disk_that_fails_is_no_empty_answer",),
    ),
    Mutant(
        "end a search at the stamp where it began",
        "Finds._answer",
        instead("command.upto_us is None", "True"),
        (f"{_FIND}::test_pages_are_stable_while_more_arrive",),
    ),
    Mutant(
        "return a message only when no other store can have one before it",
        "Finder._take",
        never("any((search.may_come_before(message) for search in searches))"),
        (f"{_FINDER}::TestTheMerge::test_pages_by_cursor_are_the_whole_in_order",),
    ),
    Mutant(
        "refuse the cursor of another search",
        "unpack_cursor",
        never("version != _VERSION or digest != _digest(search)"),
        (f"{_FINDER}::test_a_cursor_of_another_search_is_refused",),
    ),
)
