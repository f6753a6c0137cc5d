"""Say which order keys hold messages up: behind which message, who has it, since when and why."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from qmq.cli.common.formatting import age, age_of, iso, number, visible

if TYPE_CHECKING:
    from qmq import BlockedSlot


def blocked_text(slot: BlockedSlot) -> str:
    """Return how many messages wait, for which order key, who has it or when it comes again, since when and why."""
    key = f"slot {slot.slot}" if slot.order_key is None else f"order key {visible(slot.order_key)} (slot {slot.slot})"
    waits = f"{number(slot.waiting, 'message')} {'waits' if slot.waiting == 1 else 'wait'}"
    return f"{waits} for {key} of {slot.subject}: {_why(slot)}"


def blocked_fields(slot: BlockedSlot) -> dict[str, object]:
    """Return all that is known of a slot, for JSON."""
    return {
        "subject": slot.subject,
        "slot": slot.slot,
        "order_key": slot.order_key,
        "waiting": slot.waiting,
        "reason": slot.reason,
        "consumer": slot.consumer,
        "since": iso(slot.since),
        "due": iso(slot.due),
        "attempts": slot.attempts,
        "failure": slot.failure,
        "message_id": slot.message_id,
    }


def _why(slot: BlockedSlot) -> str:
    name = "an earlier one" if slot.message_id is None else f"an earlier one ({slot.message_id})"
    if slot.reason != "retrying":
        since = "" if slot.since is None else f" for {age_of(slot.since)}"
        attempt = f", attempt {slot.attempts}" if slot.attempts > 1 else ""
        return f"{slot.consumer} has {name} in flight{since}{attempt}"
    failed = f" after {number(slot.attempts, 'failed attempt')}" if slot.attempts else ""
    why = f": {visible(slot.failure)}" if slot.failure else ""
    if slot.due is None:
        return f"{name} is to be delivered again first{failed}{why}"
    left = (slot.due - datetime.now(UTC)).total_seconds()
    comes = f"comes again in {age(left)}" if left > 0 else f"is due again since {age(-left)}, and no pull has taken it"
    return f"{name} {comes}{failed}{why}"
