"""QMQ beside a database: an outbox and an inbox in its tables, so that no message is lost or doubled between the two.

Needs the extra: ``pip install "qmq[sql]"``, and the driver of the database.
"""
