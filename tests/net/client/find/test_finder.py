"""Searches over stores without a network: their merge, limits and cursors, and the searches that lack something."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.errors import BrokersMissed, InvalidName, InvalidOption, QmqError, StorageFailed, UsageError
from qmq.format.batch import BatchLimits, check_batch, stamp
from qmq.format.build import RunContent, build_batch, make_header
from qmq.format.pieces import read_answer
from qmq.net.client.find.finder import Finder, search_terms
from qmq.net.client.find.requests import FoundPage
from qmq.net.client.find.stored_message import StoredMessage
from qmq.net.protocol.selection import Boundary, Selection

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class FakeStore:
    """A store with batches of one message each, stored at given microseconds; it looks at *step* of them at a time."""

    def __init__(self, number: int, stamps: list[int], step: int = 2) -> None:
        self.name = f"broker-{number}"
        self.id = bytes([number]) * 6
        self.stamps = sorted(set(stamps))
        self.step = step
        self.answers = True
        self.error: QmqError | None = None
        self.unreadable = 0
        self.pages = 0

    async def store_id(self) -> bytes:
        if not self.answers:
            raise TimeoutError
        return self.id

    async def page(
        self, selection: Selection, newest: bool, after: Boundary | None, upto_us: int | None, max_count: int
    ) -> FoundPage:
        self.pages += 1
        if self.error is not None:
            raise self.error
        upto = upto_us or max(self.stamps, default=0) + 1
        wanted = [at for at in self.stamps if selection.since_us <= at < min(selection.until_us, upto)]
        if after is not None:
            wanted = [at for at in wanted if ((at, 0) < after if newest else (at, 0) >= after)]
        step = min(self.step, max_count)
        looked = wanted[-step:] if newest else wanted[:step]
        left = len(wanted) - len(looked)
        runs = [run for at in looked if self.takes(at) for run in self.runs(at)]
        goes_on = None
        if left:
            goes_on = Boundary(looked[0], 0) if newest else Boundary(looked[-1], 1)
        return FoundPage(runs, goes_on, upto, len(looked), left, self.unreadable)

    def takes(self, at: int) -> bool:
        return at % 3 != 0

    def runs(self, at: int) -> list[object]:
        header = make_header(f"key-{at}")
        content = RunContent("shop.mail", [b"body %d" % at], [header])
        parts = build_batch([content], created_at_us=1, producer_id=bytes(16), producer_sequence=0)
        view = memoryview(bytearray(b"".join(parts)))
        batch = check_batch(view, BatchLimits())
        stamp(
            view, batch, position=at * 1_000, stored_at_us=at, partition=0, store_id=self.id, secret=bytes(16),
            first_sequences=at,
        )  # fmt: skip
        return list(read_answer(view)[0])


async def all_of(finder: Finder) -> list[StoredMessage]:
    return [message async for message in finder]


def order(messages: list[StoredMessage]) -> list[tuple[int, str]]:
    return [(message.stored_at_us, message.broker) for message in messages]


def expected(stores: list[FakeStore], newest: bool) -> list[int]:
    return sorted((at for store in stores for at in store.stamps if store.takes(at)), reverse=newest)


STAMPS = st.lists(st.lists(st.integers(1, 60), max_size=12), min_size=1, max_size=3)


class TestTheMerge:
    @given(stamps=STAMPS, newest=st.booleans(), page=st.integers(1, 5), steps=st.integers(1, 4))
    async def test_pages_by_cursor_are_the_whole_in_order(
        self, stamps: list[list[int]], newest: bool, page: int, steps: int
    ) -> None:
        stores = [FakeStore(number, some, steps) for number, some in enumerate(stamps)]
        whole = await all_of(Finder(search_terms(newest=newest, limit=None), lambda: stores))
        assert [message.stored_at_us for message in whole] == expected(stores, newest)
        found: list[StoredMessage] = []
        cursor: str | None = None
        for _ in range(100):
            finder = Finder(search_terms(newest=newest, limit=page, cursor=cursor), lambda: stores)
            some = await all_of(finder)
            found += some
            for store in stores:  # more arrives, which changes no page
                store.stamps.append(max(store.stamps, default=0) + 1_000)
            cursor = finder.cursor
            assert finder.is_complete is (cursor is None)
            if cursor is None:
                break
        if all(stamps):  # an empty store was searched up to what it had when it was asked
            assert order(found) == order(whole)

    async def test_a_message_found_already_is_known_without_waiting(self) -> None:
        finder = Finder(search_terms(limit=3), lambda: [FakeStore(1, [1, 2, 4, 5])])
        assert finder.known() is None
        assert [one.stored_at_us for one in await finder.page(1)] == [1]
        assert finder.known().stored_at_us == 2  # type: ignore[union-attr]
        assert finder.known() is None, "the next one has to be asked for"
        assert [one.stored_at_us for one in await finder.page()] == [4]
        assert finder.known() is None, "the limit is reached"
        assert await finder.page() == []
        assert not finder.is_complete
        assert finder.progress.found == 3


async def test_a_search_that_takes_too_long_says_so_and_goes_on_by_its_cursor() -> None:
    now = [0.0]

    class Slow(FakeStore):
        async def page(self, *arguments: object) -> FoundPage:
            now[0] += 1.0
            return await super().page(*arguments)  # type: ignore[arg-type]

    store = Slow(1, [3, 6, 9, 12, 15, 16])
    finder = Finder(search_terms(stop_after=2), lambda: [store], lambda: now[0])
    assert await all_of(finder) == []
    assert not finder.is_complete
    assert finder.cursor is not None
    assert (finder.progress.looked, finder.progress.left) == (4, 2)
    assert finder.progress.share == pytest.approx(2 / 3)
    more = Finder(search_terms(cursor=finder.cursor), lambda: [store])
    assert [one.stored_at_us for one in await all_of(more)] == [16]
    assert more.is_complete
    assert more.cursor is None


async def test_a_broker_that_is_away_is_named_and_the_rest_is_shown() -> None:
    here, away = FakeStore(1, [1, 2]), FakeStore(2, [4])
    away.answers = False
    finder = Finder(search_terms(), lambda: [here, away])
    assert [one.stored_at_us for one in await all_of(finder)] == [1, 2]
    assert finder.missed == ("broker-2",)
    assert not finder.is_complete
    away.answers = True
    more = Finder(search_terms(cursor=finder.cursor), lambda: [here, away])
    assert [one.stored_at_us for one in await all_of(more)] == [4], "only what was missed"
    here.answers = away.answers = False
    with pytest.raises(BrokersMissed, match="broker-1, broker-2"):
        await all_of(Finder(search_terms(), lambda: [here, away]))


async def test_a_disk_that_fails_is_an_error_behind_the_rest() -> None:
    here, broken = FakeStore(1, [1, 2]), FakeStore(2, [4])
    broken.error = StorageFailed("the disk is gone")
    finder = Finder(search_terms(), lambda: [here, broken])
    assert [one.stored_at_us for one in await finder.page()] == [1, 2]
    with pytest.raises(StorageFailed, match="gone"):
        await finder.page()
    assert not finder.is_complete


async def test_unreadable_places_make_a_search_incomplete() -> None:
    store = FakeStore(1, [1, 2])
    store.unreadable = 1
    finder = Finder(search_terms(), lambda: [store])
    assert len(await all_of(finder)) == 2
    assert finder.unreadable == 1
    assert not finder.is_complete


async def test_copies_that_several_groups_have_come_once() -> None:
    one, other = FakeStore(1, [1, 2]), FakeStore(1, [1, 2])
    assert len(await all_of(Finder(search_terms(key="k"), lambda: [one, other]))) == 2


async def test_times_are_bounds_and_exact() -> None:
    store = FakeStore(1, [1, 2, 4, 5])
    at = [EPOCH + timedelta(microseconds=stamp) for stamp in range(6)]
    for since, until, stamps in (
        (at[2], None, [2, 4, 5]),
        (None, at[4], [1, 2]),
        (at[2], at[5], [2, 4]),
        (at[3], at[4], []),
    ):
        found = await all_of(Finder(search_terms(since=since, until=until), lambda: [store]))
        assert [one.stored_at_us for one in found] == stamps


@pytest.mark.parametrize(
    ("terms", "text"),
    [
        ({"prefix": "bad..name"}, "not a valid name"),
        ({"prefix": 5}, "must be a str"),
        ({"key": 5}, "must be a str"),
        ({"key": ""}, "0 bytes"),
        ({"key": "k" * 1_025}, "1,025 bytes"),
        ({"key": "\ud800"}, "not text"),
        ({"since": "yesterday"}, "aware datetime"),
        ({"since": EPOCH.replace(tzinfo=None)}, "no time zone"),
        ({"until": 5.0}, "aware datetime"),
        ({"since": EPOCH + timedelta(days=2), "until": EPOCH + timedelta(days=1)}, "not before"),
        ({"since": EPOCH + timedelta(days=2), "until": EPOCH + timedelta(days=2)}, "not before"),
        ({"contains": ""}, "not empty"),
        ({"contains": b"x"}, "not empty"),
        ({"contains": "\ud800"}, "not text"),
        ({"contains": "x" * 5_000}, "at most"),
        ({"limit": 0}, "limit"),
        ({"limit": True}, "limit"),
        ({"stop_after": "soon"}, "stop_after"),
        ({"cursor": "no cursor!"}, "is none"),
        ({"cursor": ""}, "is none"),
        ({"cursor": "é"}, "is none"),
        ({"cursor": "kwHOp9Sv"}, "is none"),
    ],
)
def test_wrong_arguments_are_refused_at_once(terms: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        search_terms(**terms)  # type: ignore[arg-type]
    assert isinstance(caught.value, InvalidName | InvalidOption | UsageError)
    assert not caught.value.retryable


async def test_a_cursor_of_another_search_is_refused() -> None:
    finder = Finder(search_terms("shop.", limit=1), lambda: [FakeStore(1, [1, 2, 4, 5])])
    await all_of(finder)
    assert finder.cursor is not None
    search_terms("shop.", limit=7, cursor=finder.cursor)
    for other in ({"prefix": "house."}, {"key": "k"}, {"newest": True}, {"contains": "x"}):
        with pytest.raises(UsageError, match="another search"):
            search_terms(**{"prefix": "shop.", **other}, cursor=finder.cursor)  # type: ignore[arg-type]
