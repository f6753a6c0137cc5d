"""Wakes a relay when PostgreSQL says that rows were committed; other databases are looked at from time to time."""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

log = logging.getLogger("qmq.sql")

#: The channel on which programs tell of new rows.
CHANNEL: Final = "qmq_outbox"
_LOOK_S: Final = 0.5
_AGAIN_S: Final = 5.0


class Listener:
    """A thread with a connection of its own that waits for notifications. Use it in a ``with`` block."""

    def __init__(self, connect: Callable[[], AbstractContextManager[Any]], wake: Callable[[], object]) -> None:
        """*connect* opens a connection of psycopg or psycopg2; *wake* is called in the thread."""
        self._connect = connect
        self._wake = wake
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="qmq-listen", daemon=True)

    def __enter__(self) -> Listener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(2 * _LOOK_S)

    def _run(self) -> None:
        while not self._ends.is_set():
            try:
                with self._connect() as driver:
                    self._listen(driver)
            except Exception as error:  # of the driver, or of what is around it: the relay looks by itself meanwhile
                log.debug("no notifications of the database: %s", error)
                self._ends.wait(_AGAIN_S)

    def _listen(self, driver: Any) -> None:
        driver.autocommit = True
        driver.cursor().execute(f"LISTEN {CHANNEL}")
        self._wake()
        while not self._ends.is_set():
            if select.select([driver.fileno()], [], [], _LOOK_S)[0] and _has_news(driver):
                self._wake()


def _has_news(driver: Any) -> bool:
    if hasattr(driver, "poll"):  # psycopg2
        driver.poll()
        has_news = bool(driver.notifies)
        driver.notifies.clear()
        return has_news
    return bool(list(driver.notifies(timeout=0)))
