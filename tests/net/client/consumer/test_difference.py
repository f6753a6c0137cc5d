"""A group exists with other settings than a consumer asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import qmq
from tests.broker_process import running_broker


async def test_a_group_that_differs_is_logged_refused_or_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_broker(tmp_path / "data") as url, qmq.connect(url) as client:
        async with client.subscribe("a.", group="g", max_attempts=3):
            pass
        async with client.subscribe("a.", group="g", max_attempts=5):
            assert "max_attempts=3" in caplog.text
        with pytest.raises(qmq.GroupMismatch, match="max_attempts=3"):
            async with client.subscribe("a.", group="g", max_attempts=5, on_difference="raise"):
                pass
        assert (await client.admin.groups("g"))[0].consumers == 0
        async with client.subscribe("a.", group="g", max_attempts=5, on_difference="apply"):
            assert (await client.admin.groups("g"))[0].settings["max_attempts"] == 5
        async with client.subscribe("a.", group="g", max_attempts=5, on_difference="raise"):
            pass


async def test_another_word_is_refused(tmp_path: Path) -> None:
    client: Any = qmq.connect()
    with pytest.raises(qmq.InvalidOption, match="on_difference"):
        client.subscribe("a.", group="g", on_difference="ignore")
