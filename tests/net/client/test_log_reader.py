"""Reading a broker's log over the wire: in pieces, over restarts, and never other bytes than were stored."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qmq
from qmq.errors import ConnectionLost, InvalidOption, ProtocolError
from qmq.format.layout import INDEX_DTYPE
from qmq.net.client import log_reader as log_reading
from qmq.net.client.address import Address, parse_url
from qmq.net.client.log_reader import LogReader
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FRAME, FRAME_SIZE, FrameKind
from tests.broker_process import BrokerProcess, broker_process
from tests.storage.stores import segment_files

BATCHES = 60


#: A few segments hold what the tests send.
SMALL: dict[str, Any] = {
    "segment_bytes": 1 << 20, "max_frame_bytes": 1 << 19, "max_message_bytes": 1 << 18, "partitions": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker with a few segments."""
    path = tmp_path_factory.mktemp("log") / "data"
    with broker_process(path, **SMALL) as started:
        with qmq.connect_sync(started.url, durability="append") as client:
            for number in range(BATCHES):
                client.send_many(f"a.{number % 3}", [bytes([number]) * 60_000, b"small"])
        yield started


def reader_of(url: str) -> LogReader:
    return LogReader(parse_url(url)[0])


def test_reads_all_that_lies_there(broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reading, "PIECE_BYTES", 100_000)
    found = 0
    with closing(reader_of(broker.url)) as reader:
        partitions, _ = reader.segments(0)
        assert partitions == 2
        for partition in range(partitions):
            _, spans = reader.segments(partition)
            files = segment_files(broker.path, partition)
            assert [span.base for span in spans] == [int(path.stem, 16) for path in files]
            whole = b"".join(path.read_bytes()[: end - base] for path, (base, end, _) in zip(files, spans, strict=True))
            assert reader.read(partition, spans[0].base, len(whole) + 500_000) == whole
            for span, path in zip(spans, files, strict=True):
                assert (
                    reader.read(partition, span.base, span.end - span.base) == path.read_bytes()[: span.end - span.base]
                )
                assert reader.read(partition, span.base + 70, 150_000) == path.read_bytes()[70:150_070]
                told = reader.batches(partition, span.base, span.end)
                found += sum(len(np.frombuffer(records, INDEX_DTYPE)) for records in told)
        assert len(reader.store_id) == 6
        with pytest.raises(InvalidOption, match="no partition 7"):
            reader.segments(7)
        assert reader.segments(0)[0] == 2  # it goes on after an error
    assert found == BATCHES


def test_a_broker_that_restarts_is_waited_for(tmp_path: Path) -> None:
    with broker_process(tmp_path / "data") as broker:
        with qmq.connect_sync(broker.url) as client:
            client.send("a", b"body")
        with closing(reader_of(broker.url)) as reader:
            ((span,), size) = reader.segments(0)[1], 200
            before = reader.read(0, span.base, size)
            broker.kill()
            broker.start()
            assert reader.read(0, span.base, size) == before


def test_a_broker_that_is_not_there_is_named() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    reader = LogReader(Address("127.0.0.1", port), give_up_after=0)
    with closing(reader), pytest.raises(ConnectionLost, match=f":{port}"):
        reader.segments(0)


WELCOME = frames.pack_meta({"store_id": b"store!"})


@contextmanager
def answering(*answers: Callable[[int], bytes]) -> Iterator[LogReader]:
    """A reader whose requests after the hello get these answers, each made of the request's number."""

    def serve() -> None:
        sock, _ = server.accept()
        with closing(sock):
            for answer in (lambda number: frames.encode_frame(FrameKind.WELCOME, number, WELCOME), *answers):
                size, _, _, _, number = FRAME.unpack(_received(sock, FRAME_SIZE))
                _received(sock, size - FRAME_SIZE)
                sock.sendall(answer(number))

    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with closing(LogReader(Address("127.0.0.1", server.getsockname()[1]), give_up_after=0)) as reader:
            yield reader
        thread.join()


def _received(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += sock.recv(size - len(data))
    return data


def _log_bytes(number: int, data: bytes) -> bytes:
    return frames.encode_frame(FrameKind.LOG_BYTES, number, b"", len(data)) + data


def test_short_answers_are_completed() -> None:
    with answering(lambda number: _log_bytes(number, b"abc"), lambda number: _log_bytes(number, b"de")) as reader:
        assert reader.read(0, 100, 5) == b"abcde"
    with answering(lambda number: _log_bytes(number, b"abc"), lambda number: _log_bytes(number, b"")) as reader:
        assert reader.read(0, 100, 5) == b"abc"


@pytest.mark.parametrize(
    "answer",
    [
        lambda number: _log_bytes(number, b"more than was asked for"),
        lambda number: _log_bytes(number + 1, b"abc"),
        lambda number: frames.encode_frame(FrameKind.BATCH_LIST, number),
    ],
)
def test_answers_that_make_no_sense_are_refused(answer: Callable[[int], bytes]) -> None:
    with answering(answer) as reader, pytest.raises(ProtocolError):
        reader.read(0, 100, 5)


def test_a_list_that_was_damaged_is_not_taken() -> None:
    def damaged(number: int) -> bytes:
        meta = frames.pack_meta({"crc": 1, "after": None})
        return frames.encode_frame(FrameKind.BATCH_LIST, number, meta, 16) + bytes(16)

    with answering(damaged) as reader, pytest.raises(ConnectionLost, match="damaged"):
        list(reader.batches(0, 0, 100))
