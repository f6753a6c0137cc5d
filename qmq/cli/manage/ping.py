"""``qmq ping``: check that a broker answers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from qmq.cli.common.arguments import Seconds, given_in
from qmq.cli.common.connect import server_option
from qmq.cli.common.errors import EXIT_FAILED
from qmq.errors import ConnectionLost, QmqError, Unauthorized
from qmq.net.client.address import Address, parse_url
from qmq.net.client.blocking import Pong, ping_directory
from qmq.net.client.blocking import ping as ping_broker

#: The longest time for one try, and the pause before the next, in seconds.
_TRY: Final = 5.0
_PAUSE: Final = 0.1


@click.command(short_help="Check that a broker answers.")
@click.option("--wait", metavar="S", type=Seconds(), default=0.0, help="Keep trying for so long: 30s.")
@click.option(
    "--data-dir", metavar="DIR", type=click.Path(path_type=Path),
    help="Ask the broker of this directory, on this machine: needs no address, token or certificate.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a broker.")
@server_option
@click.pass_context
def ping(context: click.Context, wait: float, data_dir: Path | None, as_json: bool, server: str) -> None:
    """Check that each broker answers: print its address, its version and how long a request and its answer took.

    Ends with 1, and says why, if a broker does not answer within 5 s; with --wait, if it still does not after S
    seconds. A broker that asks for a token is there as well: without one this says so, and ends with 0. Probes on the
    broker's machine give --data-dir: the broker answers at a socket in it, to its own user and to root.

    \b
    Examples:
      qmq ping
      qmq ping --data-dir /var/lib/qmq/data
      qmq ping --wait 30s && qmq produce shop.order.paid '{"id": 4421}'
    """
    if data_dir is not None and given_in(context, "server") is not None:
        raise click.UsageError("give either --data-dir or --server")
    addresses: Sequence[Address | Path] = parse_url(server) if data_dir is None else [data_dir]
    found = _all(addresses, wait)
    for address, result in zip(addresses, found, strict=True):
        if as_json:
            click.echo(json.dumps(_object(address, result)))
        elif isinstance(result, Pong):
            version = f"qmq {result.version}" if result.version else "a broker that asks for a token (--token-file)"
            click.echo(f"{address}: {version}, {result.round_trip * 1_000:.2f} ms")
        if isinstance(result, QmqError):
            advice = "; is `qmq serve` running there?" if isinstance(result, ConnectionLost) else ""
            where = "" if str(address) in str(result) else f"{address}: "
            click.echo(f"qmq: {where}{' '.join(str(result).split())}{advice}", err=True)
    if any(isinstance(result, QmqError) for result in found):
        context.exit(EXIT_FAILED)


def _all(addresses: Sequence[Address | Path], wait: float) -> list[Pong | QmqError]:
    """Ask all brokers at once, each in a thread that ends with the process."""
    found: dict[int, Pong | QmqError] = {}

    def ask(index: int) -> None:
        found[index] = _one(addresses[index], wait)

    threads = [threading.Thread(target=ask, args=(index,), daemon=True) for index in range(1, len(addresses))]
    for thread in threads:
        thread.start()
    ask(0)
    for thread in threads:
        thread.join()
    return [found[index] for index in range(len(addresses))]


def _one(address: Address | Path, wait: float) -> Pong | QmqError:
    """Ask until the broker answers, for *wait* seconds but at least once."""
    end = time.monotonic() + wait
    while True:
        asked = time.perf_counter()
        try:
            left = end - time.monotonic()
            timeout = min(max(left, _PAUSE), _TRY) if wait else _TRY
            return ping_directory(address, timeout) if isinstance(address, Path) else ping_broker(address, timeout)
        except QmqError as error:
            if isinstance(error, Unauthorized) and isinstance(address, Address) and not address.token:
                return Pong("", time.perf_counter() - asked)
            if not error.retryable or time.monotonic() + _PAUSE >= end:
                return error
        time.sleep(_PAUSE)


def _object(address: Address | Path, result: Pong | QmqError) -> dict[str, object]:
    if isinstance(result, QmqError):
        return {"broker": str(address), "reached": False, "error": str(result)}
    return {
        "broker": str(address),
        "reached": True,
        "version": result.version or None,
        "asks_for_token": not result.version,
        "round_trip_ms": round(result.round_trip * 1_000, 3),
    }
