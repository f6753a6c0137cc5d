"""The safeguards of what moves to another broker when its own is gone: with one switched off a test must fail."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant

_BROKER: Final = ("tests/broker/test_handovers.py",)
_CLIENT: Final = ("tests/net/test_elsewhere.py",)

HANDING_OVER: Final = (
    Mutant(
        "answer for a hand-over when its record is on disk",
        "qmq/broker/handovers.py",
        "        self._delivery.durable.answer(HandedOver(command.connection, command.request))\n\n",
        "        self._effects.append(HandedOver(command.connection, command.request))\n\n",
        _BROKER,
    ),
    Mutant(
        "remember hand-overs over a start",
        "qmq/broker/ledger.py",
        "        self.handed = {names[at : at + HANDED_SIZE]: None for at in range(0, len(names), HANDED_SIZE)}\n",
        "        self.handed = {}\n",
        _BROKER,
    ),
    Mutant(
        "remember hand-overs since the checkpoint",
        "qmq/broker/ledger.py",
        "        self.handed[name] = None\n",
        "        self.handed[b''] = None\n",
        _BROKER,
    ),
    Mutant(
        "name what is handed over by its place",
        "qmq/broker/handovers.py",
        "            messages = MessageRange(PARTITIONS + sent.partition, sent.position, 0, 0, 1, sent.position)\n",
        "            at = self._store.row_at_position(sent.partition, sent.position)\n"
        "            (row,) = self._store.rows(sent.partition, at, 1)\n"
        "            messages = MessageRange(int(row['subject']), int(row['first_sequence']), 0, 0, 1)\n",
        _BROKER,
    ),
    # --- the client's side -------------------------------------------------------------------------------------------
    Mutant(
        "keep the acknowledgement of what another broker took",
        "qmq/net/elsewhere.py",
        "            await self.keep(late)\n            return\n",
        "            return\n",
        _CLIENT,
    ),
    Mutant(
        "tell of what was handled after the message itself was handed over",
        "qmq/net/elsewhere.py",
        '            record = {"ack": record["ack"]}\n',
        "            return None\n",
        _CLIENT,
    ),
    Mutant(
        "keep acknowledgements that could not be brought before the end",
        "qmq/net/holder.py",
        "            await self._keep_acks()\n",
        "            pass\n",
        _CLIENT,
    ),
    Mutant(
        "leave in the spool what no broker took, and only that",
        "qmq/net/spool.py",
        "                _replace(waiting, left)\n",
        "                pass\n",
        ("tests/net/test_spool.py", *_CLIENT),
    ),
    Mutant(
        "take late acknowledgements for the same subscription only",
        "qmq/broker/admin.py",
        "(member.since_us, self._store.groups.generation) != place",
        "False",
        ("tests/broker/test_admin.py", *_BROKER, *_CLIENT),
    ),
    Mutant(
        "let go of spool files that were taken for who has left",
        "qmq/net/threads.py",
        "        for thing in taken:\n            give_back(thing)\n",
        "",
        ("tests/net/test_threads.py",),
    ),
)
