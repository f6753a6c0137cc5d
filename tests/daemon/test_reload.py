"""Which new settings a running broker applies, and which need a restart."""

from __future__ import annotations

from pathlib import Path

from qmq.daemon.reload import RELOADABLE, changes_between
from qmq.settings import Settings, load


def test_reloadable_settings_exist() -> None:
    assert Settings.model_fields.keys() >= RELOADABLE


def test_changed_settings_are_applied_or_need_a_restart() -> None:
    running = load(None, ["partitions=2", "retention_ms=5"])
    read = load(None, ["max_groups=7", "retention_ms=5", "log_level=debug", "scrub_bytes_per_s=2 MiB"])
    taken, need_restart = changes_between(running, read)
    assert taken == {"log_level": "debug", "scrub_bytes_per_s": 2 << 20}
    assert need_restart == ["partitions", "max_groups"]
    assert changes_between(running, running) == ({}, [])


def test_reloadable_settings_fit_all_other_settings() -> None:
    """No setting limits another, so any mix of old and new ones is valid."""
    least = {key: 0 for key in RELOADABLE if key.startswith(("retention_m", "retention_b", "scrub_b"))}
    Settings.model_validate(
        least | {"data_dir": Path("d"), "checkpoint_ms": 10, "checkpoint_bytes": 64 << 10, "scrub_round_ms": 10}
    )
    Settings.model_validate({"max_unsynced_bytes": 1 << 20, "max_frame_bytes": 64 << 20, "reserve_bytes": 1 << 30})
