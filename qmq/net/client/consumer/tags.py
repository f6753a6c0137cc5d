"""A group's tags, checked by name: the broker goes by their bits, of which several names may have the same."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import Any

from qmq.errors import ProtocolError
from qmq.format.run import Run
from qmq.net.protocol import frames as wire


def tags_of(meta: dict[str, Any]) -> frozenset[str]:
    """The tags that an answer names. Raises ProtocolError when they were damaged on the way."""
    tags = meta["tags"]
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise ProtocolError("an answer names tags that are no texts; it is asked for again")
    if wire.crc_of_texts(tags) != meta.get("tags_crc"):
        raise ProtocolError("an answer names tags that are not what was sent; it is asked for again")
    return frozenset(tags)


def with_tags(runs: list[Run], tags: frozenset[str]) -> list[Run]:
    """Those messages that have one of the tags; the others are acknowledged, as the broker's are that it skips."""
    found = []
    for run in runs:
        wanted = [not tags.isdisjoint(run.header(index).get("t", ())) for index in range(run.count)]
        if all(wanted):
            found.append(run)
            continue
        for is_wanted, places in groupby(enumerate(wanted), itemgetter(1)):
            indexes = [index for index, _ in places]
            start, stop = indexes[0], indexes[-1] + 1
            if is_wanted:
                found.append(run.slice(start, stop))
            elif run.holder is not None:
                run.holder.ack(run.pull_sequence + start, run.pull_sequence + stop)
    return found
