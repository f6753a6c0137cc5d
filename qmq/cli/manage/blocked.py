"""Say which order keys hold messages up: behind which message, who has it, since when and why."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from qmq.cli.common.formatting import age, iso, number, visible

if TYPE_CHECKING:
    from qmq import BlockedSlot


def blocked_text(slot: BlockedSlot, now: datetime | None = None) -> str:
    """Return how many messages wait, for which order key, who has it or when it comes again, since when and why: as
    seen at the time *now* (None: this one).
    """
    key = f"slot {slot.slot}" if slot.order_key is None else f"order key {visible(slot.order_key)} (slot {slot.slot})"
    waits = number(slot.waiting, "message")
    if slot.waiting_subjects not in ((), (slot.subject,)):
        waits += f" of {', '.join(slot.waiting_subjects)}"
    waits += " waits" if slot.waiting == 1 else " wait"
    return f"{waits} for {key} of {slot.subject}: {_why(slot, datetime.now(UTC) if now is None else now)}"


def blocked_fields(slot: BlockedSlot) -> dict[str, object]:
    """Return all that is known of a slot, for JSON."""
    return {
        "subject": slot.subject,
        "slot": slot.slot,
        "order_key": slot.order_key,
        "waiting": slot.waiting,
        "waiting_subjects": list(slot.waiting_subjects),
        "reason": slot.reason,
        "consumer": slot.consumer,
        "since": iso(slot.since),
        "due": iso(slot.due),
        "attempts": slot.attempts,
        "failure": slot.failure,
        "message_id": slot.message_id,
    }


def _why(slot: BlockedSlot, now: datetime) -> str:
    name = "an earlier one" if slot.message_id is None else f"an earlier one ({slot.message_id})"
    if slot.reason != "retrying":
        since = "" if slot.since is None else f" for {age((now - slot.since).total_seconds())}"
        attempt = f", attempt {slot.attempts}" if slot.attempts > 1 else ""
        return f"{slot.consumer} has {name} in flight{since}{attempt}"
    failed = f" after {number(slot.attempts, 'failed attempt')}" if slot.attempts else ""
    why = f": {visible(slot.failure)}" if slot.failure else ""
    if slot.due is None:
        return f"{name} is to be delivered again first{failed}{why}"
    left = (slot.due - now).total_seconds()
    if left > 0:
        return f"{name} comes again in {age(left)}{failed}{why}"
    return f"{name} has been due for {age(-left)}{failed}, and no consumer has taken it{why}"
