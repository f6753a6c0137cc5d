"""Measure RocketMQ's look-ups by key: ``python -m bench.key_index_rocketmq [--messages 10000000]`` prints a table.

The same messages as those of bench.key_index, with the same keys, are sent by RocketMQ's own Java client, in batches;
then its ``queryMessage`` looks keys up, one at a time, as ``mqadmin queryMsgByKey`` does. The broker comes from Maven.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

from bench.key_index import Taken, show
from bench.peers.brokers.rocketmq import RocketMq
from bench.peers.installing import size_of
from bench.peers.peer import Promise
from bench.peers.processes import Server
from bench.peers.tools import said
from qmq.bench.values import BenchFailed

_PROGRAM: Final = Path(__file__).parent / "peers" / "tools" / "rocketmq_keys" / "KeyLookUps.java"
_TOPIC: Final = "bench-keys"
#: Look-ups of each kind.
_LOOK_UPS: Final = 1_000
_MIB: Final = 1 << 20


def measure(server: Server, messages: int, body_bytes: int) -> None:
    """Print the table."""
    more: dict[str, Any] = server.target["more"]
    environment = {"ROCKETMQ_HOME": str(more["home"])}
    said([*more["admin"], "updateTopic", "-t", _TOPIC, "-c", "DefaultCluster", "-n", more["names"]], more=environment)
    numbers = (messages, body_bytes, _LOOK_UPS)
    command = [*more["java"], _PROGRAM, more["names"], _TOPIC, *numbers]
    lines = dict[str, list[float]]()
    with subprocess.Popen(
        list(map(str, command)), env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            name, *values = line.split()
            if name in ("sent", "indexed", "there", "missing"):
                lines[name] = list(map(float, values))
            if name == "sent":
                print(f"{messages:,} messages sent in {values[0]} s", flush=True)
    if "missing" not in lines:
        raise BenchFailed(f"the program ended with {run.returncode}; {server.last_words()}")
    store = server.directory / "store"
    print(f"all of them were in the index {lines['indexed'][0]:.1f} s after the last was sent")
    index_bytes = size_of(store / "index")
    print(f"index: {index_bytes / _MIB:,.0f} MiB, made in files of 400 MiB for 20 million keys each")
    memory = server.memory()
    print(f"memory of its own: {memory.own / _MIB:,.0f} MiB, mapped files {memory.file / _MIB:,.0f} MiB")
    print("\n| look-up through its Java client, milliseconds | p50 | p99 | most |\n|---|---:|---:|---:|")
    for name, title in (("there", "key of one message"), ("missing", "key that is not there")):
        row = show(title, Taken(sorted(lines[name]), 0.0, 0.0))
        print("|".join(row.split("|")[:5]) + "|")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=10_000_000)
    parser.add_argument("--body", type=int, default=100, help="bytes of a body")
    parser.add_argument("--dir", type=Path, help="where the broker's directory is made; it is deleted at the end")
    parser.add_argument("--home", type=Path, default=Path(".peers"), help="where the broker is installed")
    options = parser.parse_args()
    peer = RocketMq()
    installed = peer.install(options.home.absolute())
    print(f"{peer.title} {installed.version}", flush=True)
    with (
        tempfile.TemporaryDirectory(dir=options.dir) as made,
        peer.start(options.home.absolute(), Path(made) / "rocketmq", Promise.PAGE_CACHE) as server,
    ):
        measure(server, options.messages, options.body)


if __name__ == "__main__":
    main()
