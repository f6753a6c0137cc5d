"""What a store keeps of one partition."""

from __future__ import annotations

from qmq.format.batch import EntryRow
from qmq.storage.consumer_log.subject_order import Rows
from qmq.storage.disk.disk import Disk
from qmq.storage.disk.free_space import Room
from qmq.storage.message_log.drop import Removals
from qmq.storage.message_log.page_cache import AtHand
from qmq.storage.opened import OpenedPartition


class Partition:
    """Logs, and how far they are claimed. ``rows`` are staged: of one batch each, or the base of a new segment."""

    __slots__ = (
        "at_hand", "claim", "consumer", "given_up", "holes", "index", "listed", "log", "number", "removals", "room",
        "rows", "written_rows",
    )  # fmt: skip

    def __init__(self, disk: Disk, number: int, opened: OpenedPartition, room: Room) -> None:
        self.number = number
        self.log = opened.log
        self.consumer = opened.consumer
        self.index = opened.index
        self.holes = opened.holes
        self.room = room
        self.at_hand = AtHand(disk, self.log)
        self.rows: list[EntryRow | Rows | int] = []
        self.written_rows = self.consumer.buffer_row
        #: The segment up to which the names of all files are known to be on disk.
        self.listed = -1
        #: What the last checkpoint said.
        self.claim = opened.claim
        #: Its last claim stands until the directory is opened again.
        self.given_up = False
        #: Segments that nobody needs any more.
        self.removals = Removals(disk, self.log.directory, self.consumer.directory, opened.claim.removed, opened.left)
        self.consumer.attend(self.log.residence)
