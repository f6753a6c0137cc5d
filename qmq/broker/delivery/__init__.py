"""Pulls: choose messages, hand them out, wait, take back.

Theory of operation
-------------------
A consumer pulls. What it may get, the first case that fits:

1. What it has in flight and has not seen, because an answer was lost (``redeliver.py``).
2. Nothing, while its window is full, or while it has a quarantined message.
3. A message that is quarantined, alone.
4. New messages and retries that are due: by rank, the higher priority first, but for the share that lower ones have
   coming; within a rank each of the two comes first in turn. No answer has both.

New messages come in the order in which they were stored, as far as nothing else is said: of several partitions by the
stamps of batches. What a group does not get is passed on the way: messages without its tags, and expired ones. An
order key adds one condition: a message waits for all earlier ones of its slot, in all subjects that its group
follows, and goes to the consumer that has one of these in flight (``order/``).

**A choice changes nothing.** ``selector.py`` goes through what there is by rank; ``select.py`` reads rows of the
consumer log, which say how many messages of which subject lie where, and makes a list of what becomes of each message
that the cursors would pass: handed out, filtered, expired or skipped. ``tracker.py`` compares the sum of that list with
how far the cursors would move, refuses the pull where they differ, and otherwise moves the cursors and stages one
record. A start moves them by that record again. So a cursor passes nothing without a word about it.

**It is cheap**, because a choice goes by runs and not by messages, reads no bytes of messages unless tags or expiries
count, and finds the next row by a cursor that it keeps: of a prefix one row number for each partition, however many
subjects it takes; of a subject its next sequence. The newest few rows are looked at one by one, and so are rows of
large batches; others are handled as columns. A batch that comes while one pull waits for it goes there without a choice
(``qmq/broker/short_way.py``).

**Nothing waits for the disk.** Where rows or batches are not in memory, the choice ends with the read that it needs
(``read_waits.py``), and the pull chooses anew once a thread has read. A pull that finds too little waits in
``wakeups.py``, by the prefixes and subjects that it is for, and costs nothing until one of these has something.

In the order to read them: ``subscriptions.py`` (who follows what), ``pull.py`` (the entry), ``serve.py`` (one pull),
``selector.py``, ``select.py`` with ``chosen_cursors.py``, ``filters.py`` and ``order/`` (the choice), ``tracker.py``
(its record), ``eligibility.py`` and ``redeliver.py`` (retries), ``encode.py`` (the answer), ``at_most_once.py``,
``ack_deadline.py``.
"""
