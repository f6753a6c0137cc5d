"""The key indexes of a partition: searches are complete with and without files, and equal to a dictionary."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.effort import part_of
from tests.storage.histories import quick_directory
from tests.storage.key_index.keyed import cover, find, keyed_run, make_all
from tests.storage.stores import Sender, checkpoint, close_cleanly, open_store, verified

KEYS = [None, "a", "b", "order-4421", "Zürich", "c" * 100]
#: What a history does: sends a batch, seals, or brings indexes and filters up to date.
ACTIONS = st.one_of(
    st.lists(st.lists(st.sampled_from(KEYS), min_size=1, max_size=8), min_size=1, max_size=3),
    st.sampled_from(["seal", "index", "cover", "reopen"]),
)


@settings(max_examples=part_of(60), deadline=None)
@given(st.lists(ACTIONS, max_size=30), st.booleans(), st.integers(0, 100), st.integers(0, 100))
def test_a_search_finds_what_a_dictionary_has(
    history: list[list[list[str | None]] | str], newest: bool, low: int, high: int
) -> None:
    with quick_directory() as path:
        store = open_store(path)
        sender = Sender(store)
        stored: dict[str, list[int]] = defaultdict(list)
        for action in history:
            part = store.partitions[0]
            if action == "seal":
                part.seal()
            elif action == "index":
                checkpoint(store)
                make_all(store)
            elif action == "cover":
                cover(store)
            elif action == "reopen":
                close_cleanly(store)
                store = open_store(path)
                sender = Sender(store)
            elif not isinstance(action, str):
                runs = [keyed_run(f"shop.s{number}", keys) for number, keys in enumerate(action)]
                sent = sender.stage(*runs)
                sender.write()
                for key in {key for keys in action for key in keys if key is not None}:
                    stored[key].append(sent.position)
        part = store.partitions[0]
        base, end = part.message_log.spans()[0].base, part.message_log.end
        start, stop = (base + (end - base) * edge // 100 for edge in (low, high))
        for key in KEYS:
            if key is not None:
                found = stored[key]
                assert find(part, key) == found
                assert find(part, key, newest=True) == found[::-1]
                between = [position for position in found if start <= position < stop]
                assert find(part, key, start, stop, newest=newest) == (between[::-1] if newest else between)
        assert find(part, "nobody's") == []
        close_cleanly(store)
        verified(path)
