"""The settings that a running broker applies from its file, and those that need a restart."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from qmq.settings import Settings

#: Settings that may change while a broker serves.
RELOADABLE: Final = frozenset(
    (
        "log_level",
        "checkpoint_ms",
        "checkpoint_bytes",
        "max_unsynced_bytes",
        "scrub_bytes_per_s",
        "scrub_round_ms",
        "retention_ms",
        "retention_max_ms",
        "retention_bytes",
        "retention_needs_archive",
    )
)


class SettingsChanges(NamedTuple):
    """The settings that differ: values by key of those that a running broker applies, and the keys of the others."""

    taken: dict[str, Any]
    need_restart: list[str]


def changes_between(running: Settings, read: Settings) -> SettingsChanges:
    """Compare the settings of a running broker with those just read."""
    changed = [key for key in Settings.model_fields if getattr(running, key) != getattr(read, key)]
    taken = {key: getattr(read, key) for key in changed if key in RELOADABLE}
    return SettingsChanges(taken, [key for key in changed if key not in RELOADABLE])
