"""Safeguards of clients of several brokers that their simulation watches: each process, and each thing that it does, is
to be told from all others.
"""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import instead, never

_SIMULATION: Final = ("tests/sim/test_brokers.py",)

OF_SEVERAL: Final = (
    Mutant(
        "name what is handed over by a client of its own",
        "HandoverClient.__init__",
        instead("os.urandom", "bytes"),
        _SIMULATION,
    ),
    Mutant(
        "give each hand-over a number of its own",
        "HandoverClient.take",
        instead("self._next_number + 1", "self._next_number"),
        _SIMULATION,
    ),
    Mutant(
        "name each client's process to the brokers",
        "Brokers.__init__",
        instead("secrets.token_bytes", "bytes"),
        _SIMULATION,
    ),
    Mutant(
        "drop what was held under another place",
        "AckSender.joined",
        instead(
            "self.fence(Fenced(f'the messages that this consumer had in flight are delivered again: {why}'))",
            "log.debug(why)",
        ),
        _SIMULATION,
    ),
    Mutant(
        "take no delivery sequences of another generation",
        "ConsumerState.is_that_of",
        instead("self[4:] == other[4:]", "self[5:] == other[5:]"),
        ("tests/net/client/consumer/test_in_flight.py", *_SIMULATION),
    ),
    # --- priorities and order keys -----------------------------------------------------------------------------------
    Mutant(
        "send a message with an order key to its broker",
        "SendWindow._takes",
        instead("broker == self._number", "self.takes_new"),
        _SIMULATION,
    ),
    Mutant(
        "move no message with an order key to another broker",
        "SendWindow.give_away",
        never("batch.broker != ANY_BROKER"),
        _SIMULATION,
    ),
    Mutant(
        "hand no message with an order key over",
        "consumer/message:_whole",
        never("run.lane >= LANE_ORDERED"),
        _SIMULATION,
    ),
    Mutant(
        "hand a message over with its priority",
        "private_batch",
        instead("one.lane", "0"),
        _SIMULATION,
    ),
)
