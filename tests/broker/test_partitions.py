"""Several partitions: batches whose subjects lie in more than one of them, and writes that fail in one of them."""

from __future__ import annotations

from pathlib import Path

from tests.broker.harness import Driven, bodies_of


def test_an_exact_pull_passes_nothing_over_that_did_not_fit(tmp_path: Path) -> None:
    driven = Driven(tmp_path, partitions=2)
    driven.do(driven.send_command({"a": [b"a"], "b": [b"first"]}))
    sent = [b"first"]
    for number in range(8):  # eight runs in the other partition; the sixth is large
        body = bytes(3_000) if number == 5 else b"small%d" % number
        driven.send("b", body)
        sent.append(body)
    driven.do(driven.send_command({"a": [b"a"], "b": [b"last"]}))
    sent.append(b"last")
    got: list[bytes] = []
    subscription = driven.subscribe("b")
    while runs := driven.pull(subscription, max_bytes=3_000):
        got += bodies_of(runs)
    assert got == sent
    driven.close()
