"""The messages of a run that have a text."""

from __future__ import annotations

from typing import Final

from qmq.errors import BadBatch, UsageError
from qmq.format.run import Run

_MOST_BYTES: Final = 4_096


class TextFilter:
    """Finds the messages that have a text in their body, a key, a tag or a property; letters count as they are."""

    def __init__(self, text: str) -> None:
        """Raises UsageError."""
        if not isinstance(text, str) or not text:
            raise UsageError(f"contains must be a text that is not empty, not {text!r:.80}")
        try:
            self._needle = text.encode()
        except UnicodeEncodeError:
            raise UsageError(f"contains={text!r:.80} is not text: it has a lone surrogate") from None
        if len(self._needle) > _MOST_BYTES:
            raise UsageError(f"contains has {len(self._needle)} bytes; it may have {_MOST_BYTES} at most")
        self._text = text

    def matches(self, run: Run) -> list[int]:
        """Return the messages of a run that have the text, ascending."""
        if bytes(run.payload).find(self._needle) < 0:  # headers are in the payload, too
            return []
        return [index for index, body in enumerate(run.bodies()) if self._needle in body or self._in_header(run, index)]

    def _in_header(self, run: Run, index: int) -> bool:
        try:
            header = run.header(index)
        except BadBatch:
            return False
        texts = [*header.get("k", ()), *header.get("t", ())]
        for name, value in header.get("p", {}).items():
            texts += (name, value)
        return any(self._text in text for text in texts)
