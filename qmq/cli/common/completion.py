"""Complete names of groups, subjects and profiles on a command line: quickly, and silently where no broker answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import click

#: The broker has this long, in seconds, for all answers.
_TIMEOUT_S: Final = 0.8
#: The most names that are offered.
_MOST: Final = 1_000


def complete_groups(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the groups that begin with *incomplete*."""
    return _names(context, incomplete, "groups")


def complete_subjects(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the subjects that begin with *incomplete*."""
    return _names(context, incomplete, "subjects")


def complete_dead_letters(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the ids of dead letters of the command's group that begin with *incomplete*."""
    return _names(context, incomplete.lower(), "dead letters")


def complete_prefixes(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the next segments of the subjects that begin with *incomplete*: prefixes, and whole subjects."""
    found = set[str]()
    for name in _names(context, incomplete, "subjects"):
        dot = name.find(".", len(incomplete))
        found.add(name if dot < 0 else name[: dot + 1])
    return sorted(found)


def _names(context: click.Context, incomplete: str, kind: str) -> list[str]:
    found: list[str] = []
    with suppress(Exception):  # a completion that fails must not write into a command line
        from qmq.net.client.address import parse_url, tls_files

        files = tls_files(*(_value_of(context, name) for name in ("tls_ca", "tls_cert", "tls_key")))
        for address in parse_url(str(_value_of(context, "server")), files):
            with suppress(Exception):
                if kind == "dead letters":
                    names = _dead_letters(address, context.params["group"])
                else:
                    names = (_groups if kind == "groups" else _subjects)(address, incomplete)
                for name in names:
                    if name.startswith(incomplete):
                        found.append(name)
                    if len(found) >= _MOST:
                        break
    return sorted(set(found))


def _value_of(context: click.Context, name: str) -> str | None:
    """Return what an option of the command says, of those that lead to the broker."""
    value = context.params.get(name)
    if isinstance(value, str):
        return value
    for parameter in context.command.params:
        if parameter.name == name:
            value, _ = parameter.consume_value(context, {})
            value = parameter.process_value(context, value)
            return None if value is None else str(value)
    raise LookupError(f"the command has no option for {name}")


def _groups(address: Any, incomplete: str) -> Iterator[str]:
    after = incomplete[:-1] if incomplete else ""  # names behind it, in order; the first that match follow soon
    for page in _pages(address, "ADMINISTER", {"action": "groups", "after": after}):
        yield from (row["group"] for row in page)


def _subjects(address: Any, incomplete: str) -> Iterator[str]:
    prefix = incomplete[: incomplete.rfind(".") + 1]
    for page in _pages(address, "SUBJECTS", {"prefix": prefix, "after": 0, "limit": _MOST}):
        yield from (row[0] for row in page)


def _dead_letters(address: Any, group: str) -> Iterator[str]:
    for page in _pages(address, "ADMINISTER", {"action": "dead_letters", "group": group, "after": 0, "limit": _MOST}):
        yield from (row["id"] for row in page if row["id"])


def _pages(address: Any, kind: str, fields: dict[str, Any]) -> Iterator[list[Any]]:
    import msgpack

    from qmq.net.client.blocking import answering_within
    from qmq.net.protocol.frames import FrameKind, pack_meta

    with answering_within(_TIMEOUT_S, address) as connection:
        while fields["after"] is not None:
            page = msgpack.unpackb(connection.ask(FrameKind[kind], meta=pack_meta(fields)).payload)
            yield page["rows"]
            fields["after"] = page["after"]
