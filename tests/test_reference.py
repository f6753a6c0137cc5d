"""docs/reference.md has every public name with an example, and the examples run."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import qmq
from qmq import testing
from tests.broker_process import broker_process
from tests.pages import Block, blocks, reader

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "reference.md").read_text("utf-8")
#: Of each name that has a heading: all up to the next heading.
SECTIONS = {
    found[1]: found[2] for found in re.finditer(r"^### ([\w.]+)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
}
CODE = "\n".join(block.text for block in blocks(PAGE))


NAMES = [*qmq.__all__, *(f"testing.{name}" for name in testing.__all__)]


def test_every_public_name_has_one_section() -> None:
    assert sorted(SECTIONS) == sorted(NAMES)
    assert len(re.findall("^### ", PAGE, re.MULTILINE)) == len(SECTIONS)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_its_description_and_an_example(name: str) -> None:
    section = SECTIONS[name]
    assert f"\n::: qmq.{name}\n" in section or name in (
        "Durability",
        "Duration",
        "Handler",
        "Mode",
        "OnDifference",
        "Priority",
    )  # types with words of their own
    assert any(block.kind == "python" for block in blocks(section))


@pytest.mark.parametrize(
    "name", [name for name in qmq.__all__ if not name.startswith("Sync") and inspect.isclass(getattr(qmq, name))]
)
def test_every_public_method_is_called_in_an_example(name: str) -> None:
    value = getattr(qmq, name)
    methods = [member for member, raw in vars(value).items() if inspect.isfunction(raw) and not member.startswith("_")]
    assert [method for method in methods if f".{method}(" not in CODE] == []


def test_every_example_runs(tmp_path: Path) -> None:
    with broker_process(tmp_path / "data") as broker, reader(tmp_path, broker.url) as read:
        for block in blocks(PAGE):
            read.run(Block(block.kind, block.text.replace("qmq://127.0.0.1:20881", broker.url), block.line))
