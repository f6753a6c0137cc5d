"""docs/OPERATIONS.md lists what there is: settings with their defaults, errors with their codes, messages."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import qmq
from qmq import errors
from qmq.settings import SettingDescription, describe, show_bytes

PAGE = (Path(__file__).parent.parent / "docs" / "OPERATIONS.md").read_text("utf-8")
ROWS = {cells[1].strip(): cells for line in PAGE.splitlines() if line.startswith("|") and (cells := line.split("|"))}

for module in pkgutil.walk_packages(qmq.__path__, "qmq."):
    if module.name != "qmq.sql.django.models":  # which only a project of Django can import
        importlib.import_module(module.name)  # some have errors of their own


def all_errors(root: type[errors.QmqError] = errors.QmqError) -> Iterator[type[errors.QmqError]]:
    for error in root.__subclasses__():
        if error.__module__.startswith("qmq."):
            yield error
            yield from all_errors(error)


@pytest.mark.parametrize("setting", describe(), ids=lambda setting: setting.key)
def test_every_setting_stands_there_as_it_is(setting: SettingDescription) -> None:
    default, allowed, description = (cell.strip() for cell in ROWS[f"`{setting.key}`"][2:5])
    assert description == setting.description
    if type(setting.default) is int:
        assert default.replace(",", "") == (
            show_bytes(setting.default) if setting.unit == "bytes" else str(setting.default)
        )
        show = show_bytes if setting.unit == "bytes" else "{:,}".format
        assert setting.minimum is not None
        assert setting.maximum is not None
        assert allowed == f"{show(setting.minimum)} to {show(setting.maximum)}"


@pytest.mark.parametrize("error", sorted(all_errors(), key=lambda error: error.code), ids=lambda error: error.code)
def test_every_error_stands_there_with_cause_and_cure(error: type[errors.QmqError]) -> None:
    name, retry, cause, cure = (cell.strip() for cell in ROWS[f"`{error.code}`"][2:6])
    assert name == f"`{error.__name__}`"
    assert retry == ("yes" if error.retryable else "no")
    assert cause
    assert cure


def test_codes_are_unique() -> None:
    codes = [error.code for error in all_errors()]
    assert len(codes) == len(set(codes))
    assert "error" not in codes


# ---------------------------------------------------------------------------------------------------------------------
# Messages

ROOT = Path(qmq.__file__).parent
#: Modules of a broker: what they log as a warning or an error stands there.
BROKER = sorted(path for folder in ("net/server", "storage", "daemon") for path in (ROOT / folder).rglob("*.py"))
#: Modules whose errors a start can end with; those that the system gives have its words.
STARTING = [
    *(ROOT / "storage" / "disk" / f"{name}.py" for name in ("envelope", "dir_lock")),
    *(ROOT / "storage" / "meta" / f"{name}.py" for name in ("identity", "subjects")),
    *(ROOT / "storage" / "recovery" / f"{name}.py" for name in ("open", "replay")),
    ROOT / "storage" / "message_log" / "segment.py",
    ROOT / "net" / "server" / "accept.py",
    *(ROOT / "daemon" / f"{name}.py" for name in ("startup", "main")),
]
VERIFIES = ("verify", "batches", "derived", "groups", "segments", "sequences")
FILE_ERRORS = {error.__name__ for error in (errors.StorageError, *all_errors(errors.StorageError))}
ENTRIES = set(re.findall(r"`([^`]+)`", " ".join(PAGE.replace("```", "").split())))


def words(node: ast.expr) -> str:
    """A literal as people read it, with … for what differs; empty when it is none."""
    match node:
        case ast.Constant(value=str(text)):
            return re.sub(r"(%[\w.]+)+", "…", text)
        case ast.JoinedStr(values=values):
            return "".join("…" if isinstance(value, ast.FormattedValue) else words(value) for value in values)
    return ""


def calls_in(path: Path) -> Iterator[ast.Call]:
    tree = ast.parse(path.read_text("utf-8"))
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def refusals() -> Iterator[str]:
    """The messages of errors that a start ends with."""
    for call in (call for path in STARTING for call in calls_in(path)):
        if isinstance(call.func, ast.Name) and call.func.id in {*FILE_ERRORS, "CannotListen", "ClockNotSet"}:
            yield words(call.args[0])


def warnings() -> Iterator[str]:
    """What a broker logs, and notes of what a start has met."""
    for call in (call for path in BROKER for call in calls_in(path)):
        match call.func:
            case ast.Attribute(value=ast.Name(id="log"), attr="warning" | "error" | "exception"):
                yield words(call.args[0])
            case ast.Attribute(value=ast.Attribute(attr="notes"), attr="append"):
                yield words(call.args[0])


def advices() -> Iterator[str]:
    """What verify advises."""
    for path in (ROOT / "storage" / "verify" / f"{name}.py" for name in VERIFIES):
        tree = ast.parse(path.read_text("utf-8"))
        named = {
            node.target.id: words(node.value)
            for node in tree.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None
        }
        for call in calls_in(path):
            if isinstance(call.func, ast.Attribute) and call.func.attr in ("note", "fault", "tell"):
                advice = call.args[-1]
                yield named.get(advice.id, "") if isinstance(advice, ast.Name) else words(advice)


def stands_there(message: str) -> bool:
    """Whether an entry is how *message* begins: as far as it says what happened, or to its end."""
    return any(message.startswith(entry.removesuffix(" …")) for entry in ENTRIES if len(entry.replace("…", "")) > 10)


@pytest.mark.parametrize("message", sorted({message for message in (*refusals(), *warnings()) if message.strip("…")}))
def test_every_message_of_a_broker_stands_there(message: str) -> None:
    assert stands_there(message)


@pytest.mark.parametrize("advice", sorted({advice for advice in advices() if advice}))
def test_every_advice_of_verify_stands_there(advice: str) -> None:
    assert advice in ENTRIES


def test_the_collection_finds_what_it_is_for() -> None:
    assert len(set(refusals())) > 15
    assert len(set(warnings())) > 15
    assert len(set(advices())) > 10
    assert not stands_there("the broker has met something new")
