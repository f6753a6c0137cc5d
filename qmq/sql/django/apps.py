"""The app, for INSTALLED_APPS."""

from __future__ import annotations

from django.apps import AppConfig


class QmqConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    """The app ``qmq.sql.django``; its tables and migrations are those of ``qmq``."""

    name = "qmq.sql.django"
    label = "qmq"
    verbose_name = "QMQ outbox and inbox"
    default_auto_field = "django.db.models.BigAutoField"
