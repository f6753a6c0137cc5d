"""Reading rows that are added: views stay good, and only published rows show. test_partition_index.py has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.storage.consumer_log.partition_index import ConsumerLog
from tests.fake_disk import FakeDisk
from tests.storage.rows import STORE, Feed, as_array


def started(path: Path, feed: Feed) -> ConsumerLog:
    log = ConsumerLog.open(FakeDisk(), path / "consumer-log" / "0", 0, STORE)
    log.load([], 0)
    log.roll(feed.bases[0])
    return log


def test_rows_are_views_that_stay_good(tmp_path: Path) -> None:
    feed = Feed()
    log = started(tmp_path, feed)
    for _ in range(6):
        log.append(as_array(feed.batch([(0, 1)])))
    log.publish(feed.position)
    early = log.rows(0, 6)
    assert not early.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        early["count"] = 0
    wanted = feed.rows
    for _ in range(40):
        log.append(as_array(feed.batch([(0, 1)])))
    log.roll(feed.roll())
    log.seal_pending()
    log.flush()
    assert early.tolist() == wanted
    log.close()


def test_only_published_rows_can_be_read(tmp_path: Path) -> None:
    feed = Feed()
    log = started(tmp_path, feed)
    ends = []
    for _ in range(3):
        log.append(as_array(feed.batch([(0, 2), (1, 1)])))
        ends.append(feed.position)
    assert len(log.rows(0, 10)) == len(log.subject_rows(0, 0, 10)) == 0
    assert log.hidden_since() == feed.rows[0][2]
    for number, end in enumerate(ends, 1):
        log.publish(end)
        assert log.rows(0, 10).tolist() == feed.rows[: 2 * number]
        assert log.subject_rows(1, 0, 10).tolist() == feed.rows[1 : 2 * number : 2]
        assert [rows.tolist() for rows in log.rows_between(0, feed.position)] == [feed.rows[: 2 * number]]
        assert sum(map(len, log.rows_since(0))) == 6
    assert log.hidden_since() is None
    log.close()
