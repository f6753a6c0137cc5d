"""QMQ beside Django: an app with the tables of outbox and inbox, which needs no SQLAlchemy.

INSTALLED_APPS = [..., "qmq.sql.django"]

outbox, inbox = qmq.sql.django.Outbox(), qmq.sql.django.Inbox("billing")
with transaction.atomic():
    order = Order.objects.create(...)
    outbox.send("shop.order.created", json={"id": order.id}, key=f"order-{order.id}")

``manage.py migrate`` makes the tables, ``manage.py qmq_outbox_relay`` sends the rows. Needs ``pip install
"qmq[django]"``.
"""

from __future__ import annotations

from qmq.sql.django.inbox import DjangoInbox as Inbox
from qmq.sql.django.outbox import DjangoOutbox as Outbox

__all__ = ["Inbox", "Outbox"]
