"""Make the Markdown of docs/BENCHMARKS.md from the results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.peers import loopback
from bench.peers.report.goals import summary
from qmq.bench.values import shown

Found = Mapping[str, Any]
_MIB = 1 << 20
_UNITS = {"bytes": "MiB"}
#: Rounds that differ by less than this factor are shown by their median alone.
_SPREAD = 1.2
#: A sender that sent this part of the requested rate has kept up.
_KEPT_UP = 0.99

_TITLES = {
    "send": "Send, acknowledged",
    "consume": "Consume and acknowledge",
    "keys": "Send with keys, acknowledged",
    "limits": "Consume a few at a time and acknowledge",
    "latency": "Latency at a fixed rate (p50 / p99 / p99.9)",
    "backlog": "Beside a backlog",
    "subjects": "Many subjects, topics, streams or queues",
    "neighbours": "Beside a group that is stuck (p50 / p99)",
    "failing": "A consumer that fails for one message of ten",
    "churn": "Consumers that come and go",
    "server": "The servers",
    "idle": "With consumers that wait",
}
_INTRO = """# Beside other brokers

Made from what `make bench-peers` saved; not written by hand. See [bench/README.md](../bench/README.md) for how it is
measured. Absolute figures belong to the machine, and move by a third from one to the next; what tells is how many times
better QMQ was **in the same round**.

## Goals
"""
_READING = """
## How to read the tables

`2.5 M [1.4]`: 2.5 million, and QMQ was 1.4 times better in the same round (below 1 the other one was better); of rates
and of times alike. QMQ itself has no brackets. Figures are medians of the rounds; where these differ by more than a
fifth, `(2.1 M to 2.9 M)` says from where to where. Of percentiles p50, p99 and p99.9 stand side by side, and so do
their brackets. Each row is one way of one client; what it calls is listed below the table.
"""


def render(
    founds: Sequence[Found], pictures: Mapping[tuple[int, str], str] | None = None, limits: str | None = None
) -> str:
    """Return the whole document. *founds* are runs of the bench, as saved; each becomes a part of it.

    *pictures*: the path of each picture by the index of the run and the work. *limits*: a text about goals out of
    reach.
    """
    lines = [_INTRO, *summary(founds)]
    if limits is not None:
        lines += ["", limits.strip("\n")]
    lines.append(_READING)
    told: set[Sequence[str | None]] = set()
    for at, found in enumerate(founds):
        lines += _about(found)
        new = [peer for peer in found["peers"] if _installed(peer) not in told]
        told.update(map(_installed, new))
        if new:
            lines += _peers(new)
        for work in dict.fromkeys(number["work"] for number in found["numbers"]):
            lines += _work(found, work, (pictures or {}).get((at, work)))
        lines += _failures(found)
    return "\n".join(lines).rstrip("\n") + "\n"


def _about(found: Found) -> Iterator[str]:
    machine = found["machine"]
    memory = machine["memory_bytes"] / (1 << 30)
    yield f"## {found['date'][:10]}: `{found['command']}`"
    yield ""
    yield (
        f"{machine['processor']}, {machine['cores']} cores, {memory:.0f} GiB, {machine['filesystem']}, Linux "
        f"{machine['kernel']}; Python {found['versions']['python']}; load before: {machine['load_average']:.1f}. "
        f"{found['rounds']} {'round' if found['rounds'] == 1 else 'rounds'}, brokers in turn; the median, and the "
        "least to the most of the rounds."
    )
    yield ""


def _peers(peers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "| broker | version | clients | page cache | fsync | starts in | installed |"
    yield "|---|---|---|---|---|---|---|"
    for peer in peers:
        if peer["absent"] is not None:
            yield f"| {peer['title']} | absent | {peer['absent']} | | | | |"
            continue
        clients = ", ".join([*(f"{name} {version}" for name, version in peer["clients"].items()), *peer["tools"]])
        promises = [peer["promises"].get(name) or f"no: {peer['cannot'].get(name)}" for name in ("page cache", "fsync")]
        starts = f"{peer['ready_after_s']:.1f} s" if peer["ready_after_s"] is not None else ""
        size = f"{peer['size_bytes'] / 1e6:.3g} MB"
        yield f"| {peer['title']} | {peer['version']} | {clients} | {promises[0]} | {promises[1]} | {starts} | {size} |"
    yield ""


def _installed(peer: Mapping[str, Any]) -> Sequence[str | None]:
    return peer["name"], peer["version"], peer["absent"]


def _work(found: Found, work: str, picture: str | None) -> Iterator[str]:
    yield f"### {_TITLES.get(work, work)}"
    yield ""
    if picture is not None:
        yield from (f"![{work}]({picture})", "")
    for promise in dict.fromkeys(number["promise"] for number in found["numbers"] if number["work"] == work):
        chosen = [one for one in found["numbers"] if (one["work"], one["promise"]) == (work, promise)]
        if work == "server":
            chosen = [_by_work(one) for one in chosen if ": " in one["what"]]
        if work == "latency":
            chosen = list(_kept_up(chosen))
        yield f"Acknowledged from: {promise}."
        yield ""
        yield from _table(found, chosen)
        yield ""
    yield from _ways(found, work)
    for peer in found["peers"]:
        if why := peer["lacks"].get(work):
            yield from (f"{peer['title']} can't do this: {why}.", "")


def _by_work(number: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a number of a server with its work as its way, so that it is a line and not a column."""
    work, what = number["what"].split(": ")
    return {**number, "way": f"during {work}", "what": what}


def _kept_up(numbers: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the numbers without the sent rates, except where a sender did not keep up."""
    for one in numbers:
        wanted = one["what"].removesuffix(" k msg/s sent")
        if wanted == one["what"] or one["median"] < _KEPT_UP * 1_000 * int(wanted):
            yield one


def _table(found: Found, numbers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table. Percentiles of one thing share a column, the lowest first."""
    titles = {loopback.NAME: loopback.TITLE} | {peer["name"]: peer["title"] for peer in found["peers"]}
    columns = list(dict.fromkeys((_column(number["what"]), number["unit"]) for number in numbers))
    cells: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for one in numbers:
        place = (one["peer"], one["client"], one["way"], _column(one["what"]), one["unit"])
        cells.setdefault(place, []).append(one)
    yield (
        "| broker | client | way | " + " | ".join(f"{what}, {_UNITS.get(unit, unit)}" for what, unit in columns) + " |"
    )
    yield "|---|---|---|" + "---|" * len(columns)
    for peer, client, way in dict.fromkeys((one["peer"], one["client"], one["way"]) for one in numbers):
        row = [_cell(cells.get((peer, client, way, *column), ())) for column in columns]
        yield f"| {titles[peer]} | {client} | {way} | " + " | ".join(row) + " |"


def _column(what: str) -> str:
    for last in (" p50", " p99", " p99.9"):
        if what.endswith(last):
            return what.removesuffix(last)
    return what


def _cell(numbers: Sequence[Mapping[str, Any]]) -> str:
    """Return one number, with its spread if that matters; or the percentiles of one thing."""
    text = " / ".join(_shown(one["median"], one["unit"]) for one in numbers)
    if len(numbers) == 1 and numbers[0]["most"] > _SPREAD * numbers[0]["least"]:
        (one,) = numbers
        text += f" ({_shown(one['least'], one['unit'])} to {_shown(one['most'], one['unit'])})"
    ratios = [one["qmq_is_better_by"] for one in numbers if one["qmq_is_better_by"] is not None]
    return f"{text} [{' / '.join(shown(ratio, 3) for ratio in ratios)}]" if ratios else text


def _shown(value: float, unit: str) -> str:
    return shown(value / _MIB if unit == "bytes" else value, 3)


def _ways(found: Found, work: str) -> Iterator[str]:
    """Yield the descriptions of the ways."""
    seen = list(
        dict.fromkeys((one["peer"], one["client"], one["way"]) for one in found["numbers"] if one["work"] == work)
    )
    lines = [
        f"- {client}, {way}: {says}"
        for peer, client, way in seen
        if (says := found["ways"].get(f"{peer}/{client}/{work}/{way}"))
    ]
    if lines:
        yield from (*lines, "")


def _failures(found: Found) -> Iterator[str]:
    if found["failures"]:
        yield "### What did not work"
        yield ""
        for failure in found["failures"]:
            step = f"{failure['peer']}, {failure['work']}, {failure['promise']}, round {failure['round'] + 1}"
            yield f"- {step}: {failure['why']}"
        yield ""
