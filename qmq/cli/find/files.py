"""Data directories and archives as places of a search, without a broker."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from qmq.archive.archive import archived_segments, is_archive
from qmq.archive.data_directory import DataDirectory, is_data_directory, open_data_directory
from qmq.archive.files import Files, local_path
from qmq.archive.locations import files_at
from qmq.archive.search.segment_search import SegmentSearch, searches_of
from qmq.errors import InvalidOption, UnknownMessage
from qmq.format.ids import MessageId
from qmq.format.layout import DELAY_PARTITION, MESSAGE_ID
from qmq.net.client.address import shown_location
from qmq.net.client.find.finder import Finder, search_terms
from qmq.net.client.find.requests import FoundPage
from qmq.net.client.find.stored_message import StoredMessage, stored_message
from qmq.net.protocol.selection import Boundary, Selection

_DELAYED = "delayed"


class FileSource:
    """One store whose segments lie in files, as a search reads it: in a thread."""

    def __init__(self, search: SegmentSearch, name: str) -> None:
        self.search = search
        self.name = name

    async def store_id(self) -> bytes:
        return self.search.store_id

    async def page(
        self, selection: Selection, newest: bool, after: Boundary | None, upto_us: int | None, max_count: int
    ) -> FoundPage:
        """Return the next messages, maybe more than *max_count*. Raises StorageError."""
        return FoundPage(*await asyncio.to_thread(self.search.step, selection, newest, after, upto_us))


class StoredFiles:
    """The segments of a data directory or of an archive. Use it with ``with``."""

    def __init__(self, location: str) -> None:
        self._location = location
        self._stack = ExitStack()
        self._sources: list[FileSource] = []
        self._delayed: list[FileSource] = []

    def __enter__(self) -> Self:
        """Open the files. Raises InvalidOption if there is neither a data directory nor an archive, StorageError."""
        with ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def _open(self, stack: ExitStack) -> None:
        shown = shown_location(self._location)
        path = local_path(self._location)
        if path is not None and is_data_directory(path):
            self._sources = self._of(stack, open_data_directory(path.absolute()))
            if is_data_directory(path / _DELAYED):
                self._delayed = self._of(stack, open_data_directory(path.absolute() / _DELAYED))
            return
        files = files_at(self._location)
        stack.callback(files.close)
        if not is_archive(files):
            raise InvalidOption(f"{shown} is neither a data directory nor an archive; name one with --data")
        segments = archived_segments(files)
        if not segments:
            raise InvalidOption(f"{shown} has no segments: an archive of Parquet alone is queried with Spark")
        self._sources = self._made(stack, files, searches_of(files, segments))

    def _of(self, stack: ExitStack, directory: DataDirectory) -> list[FileSource]:
        stack.callback(directory.files.close)
        return self._made(stack, directory.files, searches_of(directory.files, directory.segments))

    def _made(self, stack: ExitStack, files: Files, searches: list[SegmentSearch]) -> list[FileSource]:
        for search in searches:
            stack.callback(search.close)
        return [FileSource(search, files.name) for search in searches]

    # --- searches ----------------------------------------------------------------------------------------------------

    def find(self, prefix: str = "", **search: Any) -> Finder:
        """Return the messages of a search, as ``Client.find`` does."""
        return Finder(search_terms(prefix, **search), lambda: self._sources)

    async def get(self, message_id: str) -> StoredMessage:
        """Return the message with an id, as ``Client.get`` does."""
        name = MessageId.parse(message_id)
        delayed = None
        for source in self._delayed if name.partition >= DELAY_PARTITION else self._sources:
            if source.search.store_id == name.store_id:
                own = name._replace(partition=name.partition & (DELAY_PARTITION - 1))
                try:
                    run = await asyncio.to_thread(source.search.message, own)
                except UnknownMessage:
                    continue
                if name.partition < DELAY_PARTITION:
                    return stored_message(run, 0, source.name)
                delayed = stored_message(run, 0, source.name, name)
        selection = Selection(original=MESSAGE_ID.pack(*name))
        for source in self._sources:
            after: Boundary | None = None
            while True:
                page = await source.page(selection, False, after, None, 1)
                if page.runs:
                    return stored_message(page.runs[0], 0, source.name)
                if page.after is None:
                    break
                after = page.after
        if delayed is not None and delayed.deliver_at_us is not None:
            return delayed
        raise UnknownMessage(f"{shown_location(self._location)} has no message {name}")
