"""Segments searched without a broker: of a data directory, and of an archive, against the messages that were sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.archive.data_directory import open_data_directory
from qmq.archive.files import LocalFiles, LocalReading
from qmq.archive.search import segment_search
from qmq.archive.search.segment_search import SegmentSearch, searches_of
from qmq.errors import UnknownMessage
from qmq.format.ids import MessageId
from qmq.net.protocol.selection import Boundary, Selection
from tests.broker.find.test_find import Stored, expected, make_indexes, send
from tests.broker.harness import Driven

KEYS = ("a", "b", "order-4421", None)


def filled(path: Path, partitions: int = 1) -> tuple[Driven, list[Stored]]:
    """Return a broker with some segments of messages, and the messages."""
    driven = Driven(path, partitions=partitions, segment_bytes=16 << 10, max_frame_bytes=8 << 10)
    stored: list[Stored] = []
    for n in range(90):
        contents = [
            (f"shop.{run}", [(KEYS[(n + at) % 4], b"%d" % n + b"x" * 300) for at in range(2)]) for run in range(2)
        ]
        stored += send(driven, [*contents, ("house", [(None, b"-")])])
        driven.advance(1)
    return driven, stored


def all_of(search: SegmentSearch, selection: Selection, newest: bool, cursor: Boundary | None = None) -> list[Stored]:
    found: list[Stored] = []
    after = cursor
    for _ in range(10_000):
        step = search.step(selection, newest, after, None)
        assert step.unreadable == 0
        some = [
            Stored(
                run.stored_at_us, run.ordinal + index, run.subject, (run.header(index).get("k") or [None])[0], body,
                run.position,
            )
            for run in step.runs
            for index, body in enumerate(run.bodies())
        ]  # fmt: skip
        found += some[::-1] if newest else some
        if step.after is None:
            assert step.left == 0
            return found
        after = step.after
    raise AssertionError("the search does not end")


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("newest", [False, True])
def test_a_data_directory_is_searched_like_a_broker(
    tmp_path: Path, partitions: int, newest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_search, "STEP_BYTES", 5_000)
    driven, stored = filled(tmp_path, partitions)
    driven.checkpoint()
    driven.store.close()
    directory = open_data_directory(tmp_path)
    (search,) = searches_of(directory.files, directory.segments)
    stamps = [one.stored_at_us for one in stored]
    middle = (stamps[100], stamps[300])
    for selection in (
        Selection(), Selection("shop."), Selection("shop.1"), Selection("nothing."), Selection("", "a"),
        Selection("shop.0", "order-4421"), Selection("", None, *middle), Selection("shop.", "b", *middle),
        Selection("", None, stamps[-1] + 1), Selection("", None, 0, stamps[0]),
    ):  # fmt: skip
        assert all_of(search, selection, newest) == expected(stored, selection, newest)
    whole = expected(stored, Selection(), newest)
    for at in (0, 7, 123, len(whole) - 1):
        one = whole[at]
        cursor = Boundary(one.stored_at_us, one.ordinal + 1 if newest else one.ordinal)
        assert all_of(search, Selection(), newest, cursor) == whole[at:]
    search.close()


def test_a_message_is_found_by_its_id(tmp_path: Path) -> None:
    driven, stored = filled(tmp_path)
    driven.checkpoint()
    store_id = driven.store.store_id
    driven.store.close()
    directory = open_data_directory(tmp_path)
    (search,) = searches_of(directory.files, directory.segments)
    for one in stored[::17]:
        run = search.message(MessageId(store_id, 0, one.position + one.ordinal))
        assert (run.count, run.body(0), run.subject) == (1, one.body, one.subject)
    last = stored[-1]
    for position in (0, last.position + last.ordinal + 1, 1 << 62):
        with pytest.raises(UnknownMessage, match="no message"):
            search.message(MessageId(store_id, 0, position))
    search.close()


class CountedFiles(LocalFiles):
    """Remembers the files that were opened."""

    opened: list[str]

    def open(self, path: str) -> LocalReading:
        self.opened.append(path)
        return super().open(path)


@pytest.mark.parametrize("newest", [False, True])
def test_a_key_index_says_which_segments_are_read(tmp_path: Path, newest: bool) -> None:
    driven, stored = filled(tmp_path)
    rare = send(driven, [("shop.0", [("rare", b"1")])])
    stored += rare
    for n in range(60):
        stored += send(driven, [("shop.1", [("a", b"%d" % n + b"x" * 600)])])
    driven.checkpoint()
    assert make_indexes(driven, 1) > 5
    driven.store.close()
    directory = open_data_directory(tmp_path)
    files = CountedFiles(tmp_path)
    files.opened = []
    (search,) = searches_of(files, directory.segments)
    assert all_of(search, Selection("", "rare"), newest) == rare
    read = [path for path in files.opened if path.endswith(".messages")]
    assert len(read) <= 2, "that of the message, and the last one, which has no index"
    for key in ("a", "b", "order-4421", "never"):
        assert all_of(search, Selection("", key), newest) == expected(stored, Selection("", key), newest)
    search.close()


def test_bad_bytes_are_counted_and_the_rest_is_found(tmp_path: Path) -> None:
    driven, stored = filled(tmp_path)
    driven.checkpoint()
    driven.store.close()
    directory = open_data_directory(tmp_path)
    (search,) = searches_of(directory.files, directory.segments)
    segment = directory.segments[0]
    bad = stored[10]
    with (tmp_path / segment.path).open("r+b") as file:
        file.seek(bad.position - segment.base + 200)
        file.write(b"\xff" * 8)
    step = search.step(Selection(), False, None, None)
    assert step.unreadable > 0
    positions = {run.position for run in step.runs}
    assert stored[0].position in positions
    assert stored[-1].position in positions or step.after is not None
    search.close()
