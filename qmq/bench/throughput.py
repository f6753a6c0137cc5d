"""Measure rates: messages a second, sent and received."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from qmq.bench.context import DURABILITIES, KIB, SIZES, Bench, rate
from qmq.bench.processes import LoadWorker, run_together
from qmq.bench.sending import Fields
from qmq.bench.values import BenchFailed, Value

RATE = "msg/s"
RATIO = ""
#: The max_unacked of a consumer of a group: the default, and enough for the largest pulls.
WINDOWS: Final = (10_000, 100_000)


#: What an answer is limited to where that is measured: in many subjects, and in one.
SUBJECT_LIMITS: Final = (5_000, 500)
LIMITS: Final = (5_000, 1_000, 100)
_LIMITED_PULLS: Final = 2_000


def stored_bytes(messages: int, size: int) -> int:
    """Return about how many bytes *messages* take in the log, with keys and properties at most."""
    return messages * (size + 64)


def plain_loop(bench: Bench, size: int, batches: int, write: bool) -> float:
    """Return the messages a second of a bare loop that receives (and checksums and writes) the same bytes."""
    path = str(bench.directory / "plain") if write else None
    with LoadWorker(bench.directory, "raw.sink", {"write_to": path}) as sink:
        sink.go()
        result = bench.run(
            "raw.send_plain",
            writes_bytes=stored_bytes(batches * 1_000, size) if write else 0,
            port=sink.prepared["port"],
            size=size,
            count=1_000,
            batches=batches,
        )
        received = sink.result()
    if received["bytes"] != result["bytes"]:
        raise BenchFailed(f"the plain loop received {received['bytes']} of {result['bytes']} bytes")
    if write and received["crc"] != result["crc"]:
        raise BenchFailed("the plain loop received other bytes than were sent")
    return rate(result)


def ingest(bench: Bench) -> Iterator[Value]:
    """Send prepared batches of 1,000 messages over a bare socket; and the plain loop in the same round."""
    for size, size_name in SIZES.items():
        batches = bench.size.bulk(size) // 1_000 * 2
        for durability in DURABILITIES:
            with bench.target() as target:
                prefix = bench.prefix()
                result = bench.run(
                    "raw.ingest",
                    writes_bytes=stored_bytes(batches * 1_000, size),
                    url=target.url,
                    subject=prefix + "raw",
                    size=size,
                    count=1_000,
                    batches=batches,
                    flush=durability == "flush",
                )
                bench.check_content(target.url, prefix + "raw", size, batches * 1_000)
            yield Value(f"{size_name} {durability}", rate(result), RATE)
            if durability == "append":
                plain = plain_loop(bench, size, batches, write=True)
                yield Value(f"{size_name} plain loop", plain, RATE)
                yield Value(f"{size_name} append, relative to a plain loop", rate(result) / plain, RATIO)


def send_many(bench: Bench) -> Iterator[Value]:
    """`send_many` of 1,000 messages, with 16 calls in flight."""
    for size, size_name in SIZES.items():
        calls = bench.size.bulk(size) // 1_000
        for durability in DURABILITIES:
            with bench.target() as target:
                prefix = bench.prefix()
                result = bench.run(
                    "sending.many",
                    writes_bytes=stored_bytes(calls * 1_000, size),
                    url=target.url,
                    subject=prefix + "many",
                    durability=durability,
                    size=size,
                    count=1_000,
                    calls=calls,
                    in_flight=16,
                )
                bench.check_content(target.url, prefix + "many", size, calls * 1_000)
            yield Value(f"{size_name} {durability}", rate(result), RATE)


def send_nowait(bench: Bench) -> Iterator[Value]:
    """`send_nowait` with a `drain` every 1,000 without a key, every 500 with a key, and every 1,000 with key and
    properties.
    """
    ways: tuple[tuple[str, Fields, int], ...] = (
        ("", "nothing", 1_000),
        (", key, drain every 500", "key", 500),
        (", key and properties", "key and properties", 1_000),
    )
    for size, size_name in SIZES.items():
        for durability in DURABILITIES:
            for name, fields, drain_every in ways:
                messages = bench.size.bulk(size) // (1 if fields == "nothing" else 2)
                with bench.target() as target:
                    subject = bench.prefix() + "nowait"
                    result = bench.run(
                        "sending.nowait",
                        writes_bytes=stored_bytes(messages, size),
                        url=target.url,
                        subject=subject,
                        durability=durability,
                        size=size,
                        messages=messages,
                        fields=fields,
                        drain_every=drain_every,
                    )
                    _check_fields(bench, target.url, subject, size, result["messages"], fields)
                yield Value(f"{size_name} {durability}{name}", rate(result), RATE)


def _check_fields(
    bench: Bench, url: str, subject: str, size: int, messages: int, fields: Fields, count: int = 1_000
) -> None:
    if fields == "nothing":
        bench.check_content(url, subject, size, messages)
        return
    options: dict[str, Any] = {"size": size, "messages": messages, "fields": fields, "count": count}
    bench.run("checking.fields", url=url, subject=subject, **options)


def send_awaited(bench: Bench) -> Iterator[Value]:
    """`await send`, with 1,000 in flight: by 1,000 callers; and with key and property, a task for each."""
    for size, size_name in SIZES.items():
        for durability in DURABILITIES:
            for job, name, fields in _AWAITED:
                messages = bench.size.messages // 10
                with bench.target() as target:
                    subject = bench.prefix() + "awaited"
                    in_flight = min(1_000, messages)
                    result = bench.run(
                        job,
                        writes_bytes=stored_bytes(messages, size),
                        url=target.url,
                        subject=subject,
                        durability=durability,
                        size=size,
                        messages=messages,
                        in_flight=in_flight,
                    )
                    count = 1_000 if fields == "nothing" else in_flight
                    _check_fields(bench, target.url, subject, size, result["messages"], fields, count)
                yield Value(f"{size_name} {durability}{name}", rate(result), RATE)


_AWAITED: Final[tuple[tuple[str, str, Fields], ...]] = (
    ("sending.awaited", "", "nothing"),
    ("sending.tasks", ", key and property, tasks", "key and property"),
)


def producers(bench: Bench) -> Iterator[Value]:
    """Compare flush with append for 64 producers, one message at a time and 100 at a time."""
    for count, how in ((1, "one at a time"), (100, "100 at a time")):
        rates = {}
        for durability in DURABILITIES:
            with bench.target() as target:
                prefix = bench.prefix()
                result = bench.run(
                    "sending.producers",
                    url=target.url,
                    prefix=prefix,
                    durability=durability,
                    size=100,
                    clients=64,
                    count=count,
                    seconds=bench.size.seconds,
                )
                bench.run(
                    "checking.producers", url=target.url, prefix=prefix, size=100, count=count, sent=result["sent"]
                )
            rates[durability] = rate(result)
            yield Value(f"64, {how}, {durability}", rates[durability], RATE)
        yield Value(f"64, {how}, flush relative to append", rates["flush"] / rates["append"], RATIO)


def _received(bench: Bench, job: str, size: int, **options: Any) -> Iterator[Value]:
    """Measure a solo consumer, then one of a group that acknowledges, with each window; of the same messages."""
    messages = bench.size.bulk(size)
    with bench.target() as target:
        prefix = bench.prefix()
        bench.fill(target.url, prefix + "ready", size, messages)
        options |= {"url": target.url, "prefix": prefix, "size": size, "count": 1_000, "messages": messages}
        for window in (None, *WINDOWS):
            yield Value(f"{SIZES[size]}{windowed(window)}", rate(bench.run(job, window=window, **options)), RATE)


def windowed(window: int | None) -> str:
    """Return the part of a measurement's name for that window."""
    return "" if window is None else f", acked, window {window:,}"


def pull(bench: Bench) -> Iterator[Value]:
    """`pull` of up to 10,000, reading every body; solo, and in a group with acks."""
    for size in SIZES:
        yield from _received(bench, "receiving.pull", size, max_count=10_000)


def pull_batch(bench: Bench) -> Iterator[Value]:
    """`pull_batch` of up to 50,000, solo and in a group with acks, and of up to 5,000, 1,000 and 100 in a group; and a
    copy over loopback.
    """
    for size, size_name in SIZES.items():
        messages = bench.size.bulk(size) * 2
        with bench.target() as target:
            prefix = bench.prefix()
            bench.fill(target.url, prefix + "ready", size, messages)
            options: dict[str, Any] = {
                "url": target.url,
                "prefix": prefix,
                "messages": messages,
                "max_count": 50_000,
            }
            alone = rate(bench.run("receiving.pull_batch", window=None, **options))
            yield Value(size_name, alone, RATE)
            for window in WINDOWS:
                found = rate(bench.run("receiving.pull_batch", window=window, **options))
                yield Value(f"{size_name}{windowed(window)}", found, RATE)
            bench.check_content(target.url, prefix + "ready", size, messages)
        for limit in LIMITS:
            yield Value(f"{size_name}{limited(limit)}", _limited_rate(bench, size, limit), RATE)
        if size == KIB:
            copy = plain_loop(bench, size, messages // 1_000, write=False)
            yield Value(f"{size_name} loopback copy", copy, RATE)
            yield Value(f"{size_name}, relative to a loopback copy", alone / copy, RATIO)


def limited(limit: int) -> str:
    """Return the part of a measurement's name for pulls of a group with that max_count."""
    return f", acked, max_count {limit:,}"


def _limited_rate(bench: Bench, size: int, limit: int) -> float:
    """Return the rate of `pull_batch` of up to *limit* in a group with the default window, with acks."""
    messages = min(bench.size.bulk(size), _LIMITED_PULLS * limit)
    with bench.target() as target:
        prefix = bench.prefix()
        bench.fill(target.url, prefix + "ready", size, messages)
        options: dict[str, Any] = {"prefix": prefix, "messages": messages, "max_count": limit, "window": WINDOWS[0]}
        found = rate(bench.run("receiving.pull_batch", url=target.url, **options))
        bench.check_content(target.url, prefix + "ready", size, messages)
    return found


def async_for(bench: Bench) -> Iterator[Value]:
    """`async for`, reading every body; solo, and in a group with acks."""
    for size in SIZES:
        yield from _received(bench, "receiving.async_for", size)


def subjects(bench: Bench) -> Iterator[Value]:
    """Send every message to a random one of 100,000 subjects, and receive by their prefix: solo, and in a group with
    acks, up to 5,000 and 500 at a time; the same with 1,000 subjects.
    """
    messages = bench.size.messages // 4
    rates: dict[str, dict[int, float]] = {"in": {}, "out": {}}
    few, many = 1_000, bench.size.subjects
    for count in (few, many):
        with bench.target() as target:
            prefix = bench.prefix()
            sent = bench.run(
                "sending.spray", url=target.url, prefix=prefix, subjects=count, size=100, messages=messages, seed=1
            )
            came = bench.run(
                "receiving.pull_batch", url=target.url, prefix=prefix, messages=messages + count, max_count=50_000
            )
            acked = {
                limit: bench.run(
                    "receiving.pull_batch", url=target.url, prefix=prefix, messages=messages + count, max_count=limit,
                    window=WINDOWS[0],
                )
                for limit in SUBJECT_LIMITS
            }  # fmt: skip
            bench.run(
                "checking.sprayed", url=target.url, prefix=prefix, subjects=count, size=100, messages=messages, seed=1
            )
            files = target.process.open_files() if target.process is not None else None
        rates["in"][count] = sent["timed"] / sent["seconds"]
        rates["out"][count] = rate(came)
        yield Value(f"{count:,} in", rates["in"][count], RATE)
        yield Value(f"{count:,} out", rates["out"][count], RATE)
        for limit, result in acked.items():
            yield Value(f"{count:,} out{limited(limit)}", rate(result), RATE)
        yield Value(f"{count:,} made", count / sent["made_s"], "subjects/s")
        if count == many and files is not None:
            yield Value("open files", files, "")
    for way, found in rates.items():
        yield Value(f"{way}, relative to 1,000 subjects", found[many] / found[few], RATIO)


def both_ways(bench: Bench) -> Iterator[Value]:
    """`send_many` and `pull_batch` of the same messages at the same time."""
    messages = bench.size.bulk(100)
    with bench.target() as target:
        prefix = bench.prefix()
        sent, came = run_together(
            bench.directory,
            (
                "sending.many",
                {
                    "url": target.url,
                    "subject": prefix + "both",
                    "durability": "append",
                    "size": 100,
                    "count": 1_000,
                    "calls": messages // 1_000,
                    "in_flight": 16,
                },
            ),
            (
                "receiving.pull_batch",
                {
                    "url": target.url,
                    "prefix": prefix,
                    "messages": messages,
                    "max_count": 50_000,
                },
            ),
        )
        bench.check_content(target.url, prefix + "both", 100, messages)
    yield Value("100 B append in", rate(sent), RATE)
    yield Value("100 B append out", rate(came), RATE)
