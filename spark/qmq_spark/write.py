"""Send rows as messages: ``df.write.format("qmq").mode("append").save("qmq://host:port")``.

Each task sends its rows by a client of its own, and ends when all are acknowledged. A message that the client sends
again after a lost connection is stored once.

A task that Spark repeats goes on behind the rows that an earlier attempt has stored. The producer of a task has a name
of the write, the micro-batch and the partition, so the broker knows how many rows it has. Rows go in chunks, each of
them one batch, and the next one once the broker has the one before: what is stored is always the first rows, up to the
end of a chunk. The last of these chunks is sent again: the broker knows it by its bytes, or refuses it if the repeated
task has other rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypedDict
from uuid import uuid4

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import ArrayType, BinaryType, DataType, MapType, StringType, StructType

import qmq
from qmq.errors import InvalidOption, QueueFull
from qmq_spark.options import TLS_NAMES, tls_options

if TYPE_CHECKING:
    import pyarrow as pa

    from qmq.archive.broker_logs import TlsPaths

#: The types that each column of a message may have.
_COLUMNS: Final[dict[str, tuple[type[DataType], ...]]] = {
    "subject": (StringType,),
    "key": (StringType,),
    "keys": (ArrayType,),
    "priority": (StringType,),
    "order_key": (StringType,),
    "tags": (ArrayType,),
    "properties": (MapType,),
    "body": (BinaryType, StringType),
}


class _SendOptions(TypedDict):
    keys: Sequence[str] | None
    tags: Sequence[str] | None
    properties: dict[str, str] | None
    priority: qmq.Priority | None
    order_key: str | None


_NAMES: Final = ("subject", "durability", "send_timeout", "producer", *TLS_NAMES)
_DURABILITIES: Final[dict[str, Literal["flush", "append"]]] = {"flush": "flush", "append": "append"}
#: The rows of a chunk, and about their bytes: below those of a batch of the client, so that a chunk is one batch.
_ROWS: Final = 8_192
_BYTES: Final = 512 << 10
#: Bytes that a message takes in a batch besides its own, at most.
_OVERHEAD: Final = 64
#: A chunk waits for its last row, and not for time: for so much of send_timeout, more than any chunk takes.
_LINGER: Final = 0.9
#: The micro-batch of a stream in which a write is made.
_BATCH_PROPERTY: Final = "streaming.sql.batchId"


@dataclass(frozen=True)
class WriteOptions:
    """The options of a write. ``subject``: the subject of all rows if they have no such column. Times in seconds.

    ``producer``: a name for the write; repeated under it, it goes on where it ended. "": tasks know nothing of earlier
    attempts. None: a name of its own.
    """

    url: str
    subject: str | None
    durability: Literal["flush", "append"]
    send_timeout: float
    tls: TlsPaths = (None, None, None)
    producer: str | None = None


def write_options(given: Mapping[str, str], schema: StructType, *, overwrite: bool) -> WriteOptions:
    """Return the options of a write, checked together with the columns. Raises InvalidOption."""
    found = {name.lower(): str(value) for name, value in given.items()}
    url = found.pop("path", "")
    if overwrite:
        raise InvalidOption('messages cannot be overwritten; append them: .mode("append")')
    if not url.startswith(("qmq://", "qmqs://")):
        raise InvalidOption(f"{url or 'nothing'} is no URL of a broker; give one: .save('qmq://127.0.0.1:20881')")
    unknown = sorted(found.keys() - set(_NAMES))
    if unknown:
        raise InvalidOption(f"there is no option {', '.join(unknown)}; there are {', '.join(_NAMES)}")
    subject, durability = found.get("subject"), _DURABILITIES.get(found.get("durability", "flush"))
    if durability is None:
        raise InvalidOption(f"option durability is {found['durability']!r}; give one of {', '.join(_DURABILITIES)}")
    try:
        send_timeout = float(found.get("send_timeout", "30"))
    except ValueError:
        raise InvalidOption(f"option send_timeout is {found['send_timeout']!r}; give seconds") from None
    _check(schema, subject)
    producer = found.get("producer")
    return WriteOptions(url, subject, durability, send_timeout, tls_options(found, url), producer)


def _check(schema: StructType, subject: str | None) -> None:
    for field in schema.fields:
        kinds = _COLUMNS.get(field.name)
        texts = not isinstance(field.dataType, ArrayType) or isinstance(field.dataType.elementType, StringType)
        if isinstance(field.dataType, MapType):
            texts = isinstance(field.dataType.keyType, StringType) and isinstance(field.dataType.valueType, StringType)
        if kinds is None or not isinstance(field.dataType, kinds) or not texts:
            raise InvalidOption(
                f"{field.name} {field.dataType.simpleString()} is no column of a message; select subject string, key "
                "string, keys array<string>, priority string, order_key string, tags array<string>, properties "
                "map<string,string>, body binary or string"
            )
    if "body" not in schema.names:
        raise InvalidOption("the rows have no column body")
    if (subject is None) == ("subject" not in schema.names):
        raise InvalidOption("give either a column subject, or the option subject for all rows")


class QmqWriter(DataSourceArrowWriter):
    """Sends rows as messages."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._name = f"spark-{uuid4().hex}" if options.producer is None else options.producer

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        options = self._options
        tls_ca, tls_cert, tls_key = options.tls
        with qmq.connect_sync(
            options.url, durability=options.durability, send_timeout=options.send_timeout,
            linger=_LINGER * options.send_timeout,
            producer=self._producer(), tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key,
        ) as client:  # fmt: skip
            last = client.last_sequence() if "," not in options.url else None
            self._send(client, chunks_of(rows_of(iterator, options.subject)), 0 if last is None else last + 1)
        return WriterCommitMessage()

    def _producer(self) -> str | None:
        """Return the name of this task's producer, which is that of each attempt."""
        if not self._name or "," in self._options.url:  # with several brokers, each has a part of the rows
            return None
        context = TaskContext.get()
        partition = context.partitionId() if context is not None else 0
        batch = context.getLocalProperty(_BATCH_PROPERTY) if context is not None else None
        return f"{self._name}-{batch or ''}-{partition}"

    def _send(self, client: qmq.SyncClient, chunks: Iterator[list[Row]], stored: int) -> None:
        """Send the chunks behind the *stored* first rows, and the one before again. Raises SendFailed, InvalidOption
        for other rows than those that are stored.
        """
        first = 0
        for chunk in chunks:
            end = first + len(chunk)
            if end >= stored:
                if is_repeat := first < stored:
                    client._number_from(first)
                for row in chunk:
                    send(client, *row)
                try:
                    client.flush()
                except qmq.SendFailed as error:
                    if is_repeat:
                        raise InvalidOption(f"{_OTHER_ROWS} ({error})") from error
                    raise
            first = end
        if first < stored:
            raise InvalidOption(_OTHER_ROWS)


#: The arguments of ``send`` behind the client.
Row = tuple[
    str, bytes, "str | Sequence[str] | None", "Sequence[str] | None", "dict[str, str] | None", "qmq.Priority | None",
    "str | None",
]  # fmt: skip
_OTHER_ROWS: Final = (
    "this task was repeated, and has other rows, or the same ones in another order, than its earlier attempt, which "
    'sent some: sort the rows within partitions, or write what was persisted; or set the option producer to "", and '
    "expect doubles"
)


def chunks_of(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Yield the rows in chunks, whose ends depend on the rows alone."""
    chunk, size = list[Row](), 0
    for row in rows:
        needed = _OVERHEAD + _size_of(row)
        if chunk and (len(chunk) == _ROWS or size + needed > _BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(row)
        size += needed
    if chunk:
        yield chunk


def _size_of(row: Row) -> int:
    """Return about how many bytes the texts and the body of a row have, rather too many."""
    subject, body, keys, tags, properties, _, order_key = row
    texts = [subject, *([keys] if isinstance(keys, str) else keys or ()), *(tags or ()), order_key or ""]
    texts += [text for pair in (properties or {}).items() for text in pair]
    return len(body) + sum(4 * len(text) + 8 for text in texts if text is not None)


def rows_of(iterator: Iterator[pa.RecordBatch], subject: str | None) -> Iterator[Row]:
    """Yield the rows of a task, checked. Raises InvalidOption."""
    for batch in iterator:
        for first in range(0, batch.num_rows, _ROWS):
            yield from _rows(batch.slice(first, _ROWS), subject)


def _rows(rows: pa.RecordBatch, subject: str | None) -> Iterator[Row]:
    columns = {name: rows.column(name).to_pylist() for name in rows.schema.names}
    none = [None] * rows.num_rows
    subjects = columns.get("subject", none) if subject is None else [subject] * rows.num_rows
    of_rows = zip(
        subjects,
        columns["body"],
        columns.get("key", none),
        columns.get("keys", none),
        columns.get("tags", none),
        columns.get("properties", none),
        columns.get("priority", none),
        columns.get("order_key", none),
        strict=True,
    )
    for name, body, key, keys, tags, properties, priority, order_key in of_rows:
        if name is None or body is None:
            raise InvalidOption(f"a row has no {'subject' if name is None else 'body'}; leave it out, or fill it")
        body = body.encode() if isinstance(body, str) else body
        if order_key is not None and priority == "normal":  # as rows that were read have it
            priority = None
        pairs = None if properties is None else dict(properties)
        yield name, body, keys or key, tags, pairs, priority, order_key


def send(
    client: qmq.SyncClient,
    subject: str,
    body: bytes,
    keys: str | Sequence[str] | None,
    tags: Sequence[str] | None,
    properties: dict[str, str] | None,
    priority: qmq.Priority | None = None,
    order_key: str | None = None,
) -> None:
    """Queue one message once the client has room for it."""
    several = [keys] if isinstance(keys, str) else keys
    options: _SendOptions = {
        "keys": several, "tags": tags, "properties": properties, "priority": priority, "order_key": order_key
    }  # fmt: skip
    try:
        client.send_nowait(subject, body, **options)
    except QueueFull:
        client.flush()
        client.send_nowait(subject, body, **options)
