"""The subjects that a selection takes, by number, learned as rows of them are met."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from qmq.broker.groups.group import is_exact
from qmq.broker.ports.rights import Rights
from qmq.net.protocol.selection import Selection
from qmq.storage.store import Store

#: Prefixes whose subjects are remembered, a byte for each subject of the store.
_REMEMBERED: Final = 16
_UNKNOWN: Final = 0
_TAKEN: Final = 1
_PASSED: Final = 2


class SubjectFilters:
    """Tells which rows are of a selection's subjects. Each name is compared once, when a row of it is first met; where
    one subject is selected, others are not.
    """

    def __init__(self, store: Store) -> None:
        self._subjects = store.subjects
        self._known: OrderedDict[tuple[str, bool, frozenset[str] | None], npt.NDArray[np.uint8]] = OrderedDict()

    def taken(
        self, numbers: npt.NDArray[Any], selection: Selection, rights: Rights | None = None
    ) -> npt.NDArray[np.bool_]:
        """Return which of these subjects are taken, and may be browsed with *rights*: bool[n]. Raises BadBytes where a
        name cannot be read.
        """
        if rights is not None and "" in rights.browse:
            rights = None
        if rights is None and not selection.prefix and (selection.is_sparse or not self._subjects.has_private):
            return np.ones(len(numbers), np.bool_)
        result: npt.NDArray[np.bool_]
        known = self._known_of(selection, rights)
        found = known[numbers]
        if not found.all():
            for number in np.unique(numbers[found == _UNKNOWN]).tolist():
                name = self._subjects.name(number)
                is_taken = selection.takes(name) and (rights is None or rights.may_browse(name))
                known[number] = _TAKEN if is_taken else _PASSED
            found = known[numbers]
        result = found == _TAKEN
        return result

    def _known_of(self, selection: Selection, rights: Rights | None) -> npt.NDArray[np.uint8]:
        key = selection.prefix, selection.is_sparse, None if rights is None else rights.browse
        count = self._subjects.count
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = np.zeros(count, np.uint8)
            if is_exact(selection.prefix) and not selection.is_sparse and not self._subjects.damaged:
                known[:] = _PASSED
                known[self._subjects.numbers_of(selection.prefix)] = _UNKNOWN
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        elif len(known) < count:
            grown = np.zeros(max(count, 2 * len(known)), np.uint8)
            grown[: len(known)] = known
            known = self._known[key] = grown
        self._known.move_to_end(key)
        return known
