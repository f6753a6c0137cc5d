"""Safeguards of clients of several brokers that their simulation watches: each process, and each thing that it does, is
to be told from all others.
"""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant

_SIMULATION: Final = ("tests/sim/test_brokers.py",)

OF_SEVERAL: Final = (
    Mutant(
        "name what is handed over by a client of its own",
        "qmq/net/elsewhere.py",
        "        self._producer_id = os.urandom(PRODUCER_ID_SIZE)\n",
        "        self._producer_id = bytes(PRODUCER_ID_SIZE)\n",
        _SIMULATION,
    ),
    Mutant(
        "give each hand-over a number of its own",
        "qmq/net/elsewhere.py",
        "number, self._next_number = self._next_number, self._next_number + 1",
        "number, self._next_number = self._next_number, self._next_number",
        _SIMULATION,
    ),
    Mutant(
        "name each client's process to the brokers",
        "qmq/net/brokers.py",
        "        self.client_id = secrets.token_bytes(16)\n",
        "        self.client_id = bytes(16)\n",
        _SIMULATION,
    ),
    Mutant(
        "drop what was held under another place",
        "qmq/net/holder.py",
        '            self.fence(Fenced(f"what this consumer held is dropped, and handed out again: {why}"))\n',
        "            log.debug(why)\n",
        _SIMULATION,
    ),
    Mutant(
        "take no pull sequences of another generation",
        "qmq/net/holding.py",
        "        return self[:2] == other[:2] and self[4:] == other[4:]\n",
        "        return self[:2] == other[:2] and self[5:] == other[5:]\n",
        _SIMULATION,
    ),
)
