"""The start of a broker: checks the clock, opens the data directory, and logs the result of recovery."""

from __future__ import annotations

import ipaddress
import logging
import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from qmq.broker.broker import Broker
from qmq.broker.ports.commands import Now
from qmq.broker.ports.limits import BrokerLimits
from qmq.broker.startup.checkpoint import BadState
from qmq.errors import QmqError
from qmq.settings import Settings, differing_settings, settings_text, shown_settings
from qmq.storage.disk.disk import Disk
from qmq.storage.store import Store, StoreOptions
from qmq.version import VERSION

log = logging.getLogger("qmq.broker")

#: 2000-01-01: a clock that shows less has not been set.
_EARLIEST_US: Final = 946_684_800_000_000
#: How many holes a start logs one by one.
_HOLES_SHOWN: Final = 100


class ClockNotSet(QmqError):
    """The machine's clock shows a time before 2000, which all stored messages would carry for good."""

    code = "clock_not_set"


def open_broker(
    directory: Path, options: StoreOptions, disk: Disk, limits: BrokerLimits, now: Now
) -> tuple[Store, Broker]:
    """Open a data directory and build its broker.

    If the broker cannot use a checkpoint, the checkpoint is removed, and the opening starts again from the one before.
    Raises the errors of Store.open and Broker; the directory is closed then.
    """
    discarded = list[Path]()
    while True:
        store = Store.open(directory, options, disk, now.wall_us, discarded)
        try:
            _log_recovery(directory, store)
            return store, Broker(store, limits, now)
        except BadState as error:
            log.error("%s", error)
            store.close(clean=False)
            if error.path is None or error.path in discarded:
                raise
            discarded.append(error.path)
        except BaseException:
            store.close(clean=False)
            raise


def _log_recovery(directory: Path, store: Store) -> None:
    """Log what opening found and did."""
    report = store.recovery
    for note in report.notes:
        log.warning("%s", note)
    if report.created:
        log.info("made the data directory %s, store %s", directory, store.store_id.hex())
        return
    messages = sum(part.replayed_messages for part in report.partitions)
    log.info(
        "opened %s, store %s, %d subjects, after a stop that was %s; %d messages after the checkpoint were read again",
        directory,
        store.store_id.hex(),
        store.subjects.name_count,
        "clean" if report.clean else "not clean",
        messages,
    )
    _log_holes(store)
    if report.power_loss:
        log.warning(
            "unsynced data may be gone (the machine was started again, or a sync had failed): positions and sequences "
            "skip ahead"
        )
    elif report.raised_by:
        log.warning("it cannot be told which messages are lost: sequences skip ahead by %d", report.raised_by)


def _log_holes(store: Store) -> None:
    """Log the bytes that are damaged or missing, once: the next checkpoint records them."""
    holes = [(part.partition, hole) for part in store.recovery.partitions for hole in (*part.damaged, *part.holes)]
    for partition, hole in holes[:_HOLES_SHOWN]:
        place = store.partition(partition).message_log.file_offset_of(hole.start)
        log.error("%s, %d bytes are bad or gone: the messages in them are lost", place, hole.end - hole.start)
    if len(holes) > _HOLES_SHOWN:
        log.error("and at %d more places; qmq verify names them", len(holes) - _HOLES_SHOWN)


def check_clock(now: Now) -> None:
    """Raise ClockNotSet if the clock shows a time before 2000."""
    if now.wall_us < _EARLIEST_US:
        shown = datetime.fromtimestamp(now.wall_us / 1_000_000, UTC)
        raise ClockNotSet(
            f"the clock of this machine shows {shown:%Y-%m-%d %H:%M} UTC, which cannot be: set it (NTP, `date -s`), "
            "then start the broker again"
        )


def log_start(settings: Settings, url: str, hosts: Iterable[str]) -> None:
    """Log the version and the settings that differ from the defaults; warn if others than this machine reach *hosts*,
    the IP addresses on which the broker lets in clients without a token.
    """
    version, python, shown = VERSION, platform.python_version(), shown_settings(settings)
    values = {key: shown[key] for key in differing_settings(settings)}
    log.info(
        "ready on %s, data in %s: QMQ %s on Python %s; %s",
        url,
        settings.data_dir,
        version,
        python,
        f"settings that differ from the defaults: {settings_text(values)}"
        if values
        else "all settings are the defaults",
        extra={"version": version, "python": python, "url": url, "settings": values},
    )
    reachable = [host for host in hosts if not ipaddress.ip_address(host.partition("%")[0]).is_loopback]
    if reachable:
        log.warning(
            "anyone who reaches %s may read, send and delete everything: insecure = true, and there are no tokens; let "
            "only trusted machines reach this port, or make tokens with `qmq tokens create`",
            settings.listen,
        )
