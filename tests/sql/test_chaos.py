"""A short run of the chaos; `python -m tests.sql.chaos --kills 200 --db all` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sql.chaos import KINDS, run


@pytest.mark.no_cover
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_killed_each_order_is_done_once(kind: str, tmp_path: Path) -> None:
    done, killed = run(kind, 4 if kind == "sqlite" else 5, 4421, tmp_path, freezes=False)
    assert done > 0
    assert all(killed[name] == 1 for name in killed)
