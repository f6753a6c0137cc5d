"""The safeguards of what moves to another broker when its own is gone: with one switched off a test must fail."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import instead, never, skip

_BROKER: Final = ("tests/broker/transfer/test_handover.py",)
_CLIENT: Final = ("tests/net/client/failover/test_handover.py",)

HANDING_OVER: Final = (
    Mutant(
        "answer for a hand-over when its record is on disk",
        "Handovers._name",
        instead("self._delivery.durable.answer", "self._effects.append"),
        _BROKER,
    ),
    Mutant(
        "remember hand-overs over a start",
        "Ledger.restore",
        instead("{names[at:at + HANDED_SIZE]: None for at in range(0, len(names), HANDED_SIZE)}", "{}"),
        _BROKER,
    ),
    Mutant(
        "remember hand-overs since the checkpoint",
        "Ledger._apply_over",
        instead("name", "b''"),
        _BROKER,
    ),
    Mutant(
        "name what is handed over by its place",
        "Handovers._name",
        instead(
            ("(messages,) = ranges_of_batch(self._store, sent.partition, sent.position, 1)"),
            (
                "log = self._store.partitions[sent.partition].consumer_log\n"
                "at = log.row_at_position(sent.position)\n"
                "row, = log.rows(at, 1)\n"
                "(messages,) = ranges_of_batch(self._store, sent.partition, sent.position, 1)\n"
                "messages = messages._replace(log=int(row['subject']), first=int(row['first_sequence']), end=0)"
            ),
        ),
        _BROKER,
    ),
    # --- the client's side -------------------------------------------------------------------------------------------
    Mutant(
        "keep the acknowledgement of what another broker took",
        "HandoverClient.take",
        skip("await self.keep(late)"),
        _CLIENT,
    ),
    Mutant(
        "tell of what was handled after the message itself was handed over",
        "HandoverClient._rest_of",
        instead("record = {'ack': record['ack']}", "return None"),
        _CLIENT,
    ),
    Mutant(
        "keep acknowledgements that could not be brought before the end",
        "AckSender.settle",
        skip("await self._spool_acks()"),
        _CLIENT,
    ),
    Mutant(
        "leave in the spool what no broker took, and only that",
        "Spool.kept",
        skip("_replace(waiting, left)"),
        ("tests/net/client/failover/test_spool.py", *_CLIENT),
    ),
    Mutant(
        "take late acknowledgements for the same subscription only",
        "AdminCommands._handled",
        never("(member.since_us, self._store.groups.generation) != known"),
        ("tests/broker/test_admin.py", *_BROKER, *_CLIENT),
    ),
    Mutant(
        "let go of spool files that were taken for who has left",
        "taken_in_thread",
        skip("for thing in taken:\n    give_back(thing)"),
        ("tests/net/client/test_in_thread.py",),
    ),
)
