"""``qmq sql``, ``qmq import`` and ``qmq outbox``: SQL over messages, queues of tables, and messages out of a database."""
