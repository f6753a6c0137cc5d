"""docs/PROTOCOL.md agrees with the code about frames, kinds, errors and limits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import qmq
from qmq import errors
from qmq.broker.ports.commands import Administer
from qmq.broker.ports.effects import Administered, PulledMessages, Sent
from qmq.broker.ports.limits import BrokerLimits
from qmq.errors import QmqError, StorageFull
from qmq.net.client.admin.admin import AdminOfOne
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind
from qmq.net.protocol.types import Disposition
from qmq.net.server import ServerOptions, replies, requests, server
from qmq.settings import Settings
from tests.broker.harness import Driven
from tests.broker.test_consuming import Consumer
from tests.broker_process import running
from tests.net.server.rules import OPTIONS

PAGE = (Path(__file__).parents[2] / "docs" / "PROTOCOL.md").read_text("utf-8")


def rows_of(title: str) -> list[list[str]]:
    """Return the rows of the table that has *title* in its head, as lists of cells."""
    head = next(line for line in PAGE.splitlines() if line.startswith("|") and title in line)
    table = PAGE[PAGE.index(head) + len(head) :].split("\n\n")[0].strip().splitlines()[1:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table]


def example(about: str) -> list[bytes]:
    """Return the bytes in the blocks between the line that begins with *about* and the next text."""
    after = PAGE[PAGE.index(about) :].split("\n", 1)[1]
    blocks = re.match(r"(```\n[0-9a-f \n]+```\n)+", after)
    assert blocks is not None
    return [bytes.fromhex(block) for block in blocks[0].split("```")[1::2]]


def test_every_kind_stands_on_the_page() -> None:
    found: dict[str, int] = {}
    for number, name, _, answer in rows_of("answered by"):
        if number:
            found[name] = int(number)
        if match := re.match(r"(\d+) ([A-Z_]+)", answer):
            found[match[2]] = int(match[1])
    assert found == {kind.name: kind.value for kind in FrameKind}


def codes() -> dict[str, type[QmqError]]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, QmqError)]
    return {kind.code: kind for kind in kinds}


#: Error codes that a broker of this version never sends.
ELSEWHERE = {
    "error", "send_failed", "send_unknown", "queue_full", "directory_in_use", "foreign_file",
    "remote_error", "retry", "brokers_missed", "usage_error", "missing_extra", "database_failed", "row_rejected",
    "query_failed",
}  # fmt: skip


def test_every_error_stands_on_the_page_with_whether_to_try_again() -> None:
    known = {code: kind for code, kind in codes().items() if code not in ELSEWHERE}
    assert {row[0]: row[1] for row in rows_of("a SEND so answered")} == {
        code: "yes" if kind.retryable else "no" for code, kind in known.items()
    }


def test_the_rows_of_lists_have_what_the_page_says(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.send("a.x", b"1")
    consumer = Consumer(driven, "c")
    consumer.pull(1)
    consumer.back(0, 1, Disposition.REJECT)
    page = dict(rows_of("a row has"))
    for action, fields in (("groups", {}), ("consumers", {"group": "g"}), ("dead_letters", {"group": "g", "limit": 0})):
        (answer,) = driven.do(Administer(1, driven.request(), action, dict(fields)))
        assert isinstance(answer, Administered)
        (row,) = answer.fields["rows"]
        assert [name for name in row if not re.search(rf"\b{name}\b", page[action])] == []


async def test_an_info_has_what_the_page_says(tmp_path: Path) -> None:
    section = PAGE[PAGE.index("`info` gives a map of these") : PAGE.index("#### Statistics")]
    names = [name for cell in re.findall(r"^\| ([\w, ]+) \|", section, re.MULTILINE)[1:] for name in cell.split(", ")]
    async with running(tmp_path / "data") as broker, qmq.connect(broker.url) as client:
        (link,) = client.admin._brokers.links
        found = await AdminOfOne(link).do("info")
    assert set(found) == set(names)
    for name in ("disks", "connections"):
        assert [key for key in found[name][0] if f"`{key}`" not in section] == []


async def test_statistics_have_what_the_page_says(tmp_path: Path) -> None:
    section = PAGE[PAGE.index("#### Statistics") : PAGE.index("#### Resends")]
    columns, names = (
        [name for cell in re.findall(r"^\| ([\w, ]+) \|", table, re.MULTILINE)[1:] for name in cell.split(", ")]
        for table in section.split("The answer for")
    )
    async with running(tmp_path / "data") as broker, qmq.connect(broker.url) as client:
        (link,) = client.admin._brokers.links
        found, groups = await AdminOfOne(link).do("stats"), PAGE.split("#### Statistics")[0]
    assert set(found) - {"columns", "groups", "after", "now_us"} == set(names)
    assert [name for name in found["columns"] if name not in columns and not re.search(rf"\b{name}\b", groups)] == []
    assert set(columns) <= set(found["columns"])
    for name in ("process", "durations"):
        assert [key for key in found[name] if f"`{key}`" not in section] == []


def test_a_welcome_has_the_names_of_the_page() -> None:
    section = PAGE[PAGE.index("WELCOME's meta:") : PAGE.index("#### Rights")]
    names = re.findall(r"^\| (\w+) \|", section, re.MULTILINE)[1:]
    assert list(frames.unpack_meta(memoryview(OPTIONS.welcome()))) == names
    assert set(names) - {"protocol"} <= set(ServerOptions._fields)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("HELLO has at most {:,} bytes", frames.MAX_HELLO_BYTES),
        ("`limit` (rows; {:,} at most)", requests.MAX_LISTED),
        ("At most {} may be open on a connection", server.MAX_LISTINGS),
        ("without an answer: {:,} beside waiting pulls", server.MAX_REQUESTS),
        ("A connection may have {:,} subscriptions", BrokerLimits().max_consumers_per_connection),
        ("`first_frame_timeout_ms` ({} s)", Settings().first_frame_timeout_ms // 1_000),
        ("protocol of QMQ, version {}", frames.PROTOCOL_VERSION),
    ],
)
def test_limits_are_those_of_the_code(text: str, number: int) -> None:
    assert text.format(number) in " ".join(PAGE.split())


def test_the_examples_are_what_the_code_makes() -> None:
    hello = frames.pack_meta({"protocol": 1, "client": "doc"})
    assert example("HELLO, request 1") == [frames.encode_frame(FrameKind.HELLO, 1, hello)]
    assert example("SEND with flush") == [frames.encode_frame(FrameKind.SEND, 2, b"", 174, frames.FLUSH)]
    stored_at_us = int.from_bytes(bytes.fromhex("00605b1a62960400"), "little")
    store_id = bytes.fromhex("7f0000015191")
    assert example("SENT: position") == [replies.sent(Sent(1, 2, 1 << 40, stored_at_us, 3, 5), store_id)]
    pull = frames.encode_frame(FrameKind.PULL, 3, b"", frames.PULL.size) + frames.PULL.pack(
        1, 100, 1, 4 << 20, 2_000, frames.NOT_EXPECTED
    )
    assert example("PULL, request 3") == [pull, replies.messages(PulledMessages(1, 3, [], 0, 0))]
    given = PulledMessages(1, 5, [bytes(174)], 174, 1, ranges=((7, 1, 1),))
    assert example("7, attempt 1") == [replies.messages(given, [4])]
    assert example("ERROR, request 4") == [frames.encode_error(4, StorageFull("no room"))]


def test_the_time_of_the_example_is_told_right() -> None:
    from qmq.net.client.producer.receipts import utc_from_us

    time = utc_from_us(int.from_bytes(bytes.fromhex("00605b1a62960400"), "little"))
    assert f"{time:%Y-%m-%d %H:%M:%S.%f} UTC" in PAGE
