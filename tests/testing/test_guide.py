"""docs/guide-testing.md: its tests run, and pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "guide-testing.md").read_text("utf-8")


def test_the_examples_run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    *tests, block = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    indented = "".join(f"    {line}\n" for line in block.splitlines())
    pytester.makepyfile("\n".join(tests) + f"\ndef test_a_block():\n{indented}")
    result = pytester.runpytest_subprocess(
        "-W", "error", "-p", "no:cacheprovider", "-p", "pytest_asyncio.plugin", "-p", "qmq.testing.pytest_plugin",
        "-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function",
    )  # fmt: skip
    result.assert_outcomes(passed=3)
