"""Markdown for docs/BENCHMARKS.md, made from what was found; nothing in it is written by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qmq.bench.values import shown

Found = Mapping[str, Any]

_TITLES = {
    "send": "Send, acknowledged",
    "consume": "Consume and acknowledge",
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
measured. Absolute figures belong to the machine; what tells is the number in brackets: **how many times better QMQ was
in the same round** (above 1 QMQ is better, below 1 the other one is).
"""


def render(founds: Sequence[Found], pictures: Mapping[tuple[int, str], str] | None = None) -> str:
    """The whole document. *founds* are runs of the bench, as saved; each becomes a part of it. *pictures*: where that
    of a work is, by the place of the run and the work's name."""
    lines = [_INTRO]
    for at, found in enumerate(founds):
        lines += _about(found)
        if not at or _installed(found) != _installed(founds[at - 1]):
            lines += _peers(found)
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


def _peers(found: Found) -> Iterator[str]:
    yield "| broker | version | clients | page cache | fsync | starts in | installed |"
    yield "|---|---|---|---|---|---|---|"
    for peer in found["peers"]:
        if peer["absent"] is not None:
            yield f"| {peer['title']} | absent | {peer['absent']} | | | | |"
            continue
        clients = ", ".join([*(f"{name} {version}" for name, version in peer["clients"].items()), *peer["tools"]])
        promises = [peer["promises"].get(name) or f"no: {peer['cannot'].get(name)}" for name in ("page cache", "fsync")]
        starts = f"{peer['ready_after_s']:.1f} s" if peer["ready_after_s"] is not None else ""
        size = f"{peer['size_bytes'] / 1e6:.3g} MB"
        yield f"| {peer['title']} | {peer['version']} | {clients} | {promises[0]} | {promises[1]} | {starts} | {size} |"
    yield ""


def _installed(found: Found) -> list[tuple[str, str | None, str | None]]:
    return [(peer["name"], peer["version"], peer["absent"]) for peer in found["peers"]]


def _work(found: Found, work: str, picture: str | None) -> Iterator[str]:
    yield f"### {_TITLES.get(work, work)}"
    yield ""
    if picture is not None:
        yield from (f"![{work}]({picture})", "")
    for promise in dict.fromkeys(number["promise"] for number in found["numbers"] if number["work"] == work):
        chosen = [one for one in found["numbers"] if (one["work"], one["promise"]) == (work, promise)]
        if work == "server":
            chosen = [_by_work(one) for one in chosen if ": " in one["what"]]
        yield f"Acknowledged from: {promise}."
        yield ""
        yield from _table(found, chosen)
        yield ""
    yield from _ways(found, work)
    for peer in found["peers"]:
        if why := peer["lacks"].get(work):
            yield from (f"{peer['title']} can't do this: {why}.", "")


def _by_work(number: Mapping[str, Any]) -> Mapping[str, Any]:
    """A number of a server with the work as its way: a line a work, else the table has a column for each."""
    work, what = number["what"].split(": ")
    return {**number, "way": f"during {work}", "what": what}


def _table(found: Found, numbers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Percentiles of one thing share a column, the lowest first."""
    titles = {peer["name"]: peer["title"] for peer in found["peers"]}
    columns = list(dict.fromkeys((_column(number["what"]), number["unit"]) for number in numbers))
    cells: dict[tuple[str, ...], str] = {}
    for one in numbers:
        place = (one["peer"], one["client"], one["way"], _column(one["what"]), one["unit"])
        cells[place] = f"{cells[place]} / {_cell(one)}" if place in cells else _cell(one)
    yield "| broker | client | way | " + " | ".join(f"{what}, {unit}" for what, unit in columns) + " |"
    yield "|---|---|---|" + "---|" * len(columns)
    for peer, client, way in dict.fromkeys((one["peer"], one["client"], one["way"]) for one in numbers):
        row = [cells.get((peer, client, way, *column), "") for column in columns]
        yield f"| {titles[peer]} | {client} | {way} | " + " | ".join(row) + " |"


def _column(what: str) -> str:
    for last in (" p50", " p99", " p99.9"):
        if what.endswith(last):
            return f"{what.removesuffix(last)}, percentiles"
    return what


def _cell(number: Mapping[str, Any]) -> str:
    text = shown(number["median"])
    if len(number["rounds"]) > 1:
        text += f" ({shown(number['least'])} to {shown(number['most'])})"
    if number["qmq_is_better_by"] is not None:
        text += f" [{number['qmq_is_better_by']:.2f}]"
    return text


def _ways(found: Found, work: str) -> Iterator[str]:
    """What the names of ways stand for."""
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
