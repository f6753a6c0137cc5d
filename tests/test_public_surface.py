"""What users build on: every ``__all__``, and the signatures of what ``qmq`` exports, held against a stored list.

A change on purpose is written down with: .venv/bin/python -m tests.test_public_surface > tests/public_surface.txt
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_origin

import qmq

STORED = Path(__file__).with_name("public_surface.txt")
#: Names of types, which have no description of their own: the reference has it.
ALIASES = (Literal, Callable)
#: Methods with underscores that users call, by syntax.
CALLED_BY_SYNTAX = ("__aiter__", "__getitem__", "__iter__", "__len__")


def all_modules() -> Iterator[str]:
    yield "qmq"
    of_django = "qmq.sql.django.models"  # which only a project of Django can import
    yield from sorted({module.name for module in pkgutil.walk_packages(qmq.__path__, "qmq.")} - {of_django})


def surface() -> Iterator[str]:
    """One line a module with ``__all__``, then one a name of ``qmq`` and a public member of it."""
    for name in all_modules():
        exported = getattr(importlib.import_module(name), "__all__", None)
        if exported is not None:
            yield f"{name}: {' '.join(exported)}"
    for name in sorted(qmq.__all__):
        yield from lines_of(name, getattr(qmq, name))


def lines_of(name: str, value: Any) -> Iterator[str]:
    if get_origin(value) in (*ALIASES, UnionType):
        yield f"qmq.{name} = {value}"
        return
    if not inspect.isclass(value):
        yield f"qmq.{name}{signature(value)}"
        return
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    yield f"class qmq.{name}({bases})"
    for member in sorted(vars(value)):
        if member.startswith("_") and member not in CALLED_BY_SYNTAX:
            continue
        raw = inspect.getattr_static(value, member)
        if isinstance(raw, property):
            yield f"  {name}.{member} -> {inspect.signature(raw.fget).return_annotation}"  # type: ignore[arg-type]
        elif callable(raw):
            kind = "async " if inspect.iscoroutinefunction(raw) or inspect.isasyncgenfunction(raw) else ""
            yield f"  {kind}{name}.{member}{signature(raw)}"
        elif not inspect.ismemberdescriptor(raw) and type(raw).__name__ != "_tuplegetter":
            yield f"  {name}.{member} = {raw!r}"
        else:
            yield f"  {name}.{member}"


def signature(value: Any) -> str:
    """As in the source: annotations without quotes, and what has no short form as ``...``."""
    text = re.sub(r"<[^>]*>", "...", str(inspect.signature(value)))
    return re.sub(r"(: |-> )(['\"])(.*?)\2", r"\1\3", text)


def test_the_public_surface_is_the_stored_one() -> None:
    advice = "if the change is meant: .venv/bin/python -m tests.test_public_surface > tests/public_surface.txt"
    assert list(surface()) == STORED.read_text("utf-8").splitlines(), advice


def test_everything_exported_is_there_and_documented() -> None:
    for name in qmq.__all__:
        assert inspect.getdoc(value := getattr(qmq, name)) or get_origin(value) in ALIASES, name
    assert set(qmq.__all__) <= set(dir(qmq))
    assert list(qmq.__all__) == sorted(qmq.__all__)


def test_public_members_are_documented() -> None:
    undocumented = [
        f"{name}.{member}"
        for name in qmq.__all__
        if inspect.isclass(value := getattr(qmq, name))
        for member, raw in vars(value).items()
        if not member.startswith("_") and (callable(raw) or isinstance(raw, property)) and not inspect.getdoc(raw)
    ]
    assert undocumented == []


def test_every_error_a_user_can_meet_is_exported() -> None:
    """So that `except qmq.X` works for each code of docs/OPERATIONS.md that a client can be answered with."""
    from qmq import errors

    of_the_client = {
        "QmqError",
        "SendFailed",
        "SendUnknown",
        "QueueFull",
        "ConnectionLost",
        "InvalidName",
        "InvalidOption",
    }
    assert of_the_client <= set(qmq.__all__)
    for name in qmq.__all__:
        if inspect.isclass(value := getattr(qmq, name)) and issubclass(value, Exception):
            assert getattr(errors, name) is value


if __name__ == "__main__":
    print("\n".join(surface()))
