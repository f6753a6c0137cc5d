"""What a group may set."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from qmq.errors import InvalidOption

RETRY_DELAYS_US: Final = tuple(s * 1_000_000 for s in (5, 10, 30, 60, 120, 300, 600, 1_800, 3_600, 7_200))


class GroupSettings(NamedTuple):
    """What a group may set; the broker's answer to each is the one that counts."""

    max_attempts: int = 16
    retry_delays_us: tuple[int, ...] = RETRY_DELAYS_US
    max_lapses: int = 3
    max_unacked: int = 10_000
    max_unacked_bytes: int = 64 << 20
    expire_after_us: int = 0
    max_handling_us: int = 0

    def delay_us(self, attempt: int) -> int:
        """How long to wait after that attempt (from 1) failed."""
        return self.retry_delays_us[min(attempt, len(self.retry_delays_us)) - 1]


def settings_of(before: GroupSettings, given: dict[str, Any]) -> GroupSettings:
    """*before* with what is given. Raises InvalidOption."""
    unknown = given.keys() - set(GroupSettings._fields)
    if unknown:
        raise InvalidOption(
            f"a group has no setting {', '.join(sorted(unknown))}; it has {', '.join(GroupSettings._fields)}"
        )
    return before._replace(**given)
