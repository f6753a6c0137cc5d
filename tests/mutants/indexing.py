"""The safeguards of key indexes: with one switched off a test must fail."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import instead, never, skip

_FAULTS: Final = ("tests/storage/key_index/test_faults.py",)
_FILE: Final = ("tests/storage/key_index/test_key_file.py",)
_HASHES: Final = ("tests/storage/key_index/test_hashes.py",)
_INDEXER: Final = ("tests/daemon/test_key_indexer.py",)
_WALK: Final = ("tests/storage/key_index/test_walk.py",)
_ARCHIVE: Final = ("tests/archive/test_keys.py",)

OF_KEY_INDEXES: Final = (
    Mutant(
        "check each page of a key index",
        "KeyFile._page",
        never("not is_page(page, number)"),
        _FAULTS,
    ),
    Mutant(
        "compare the header of a key index with its segment",
        "_checked_header",
        never("first != pack_first_page(expected)"),
        _FILE,
    ),
    Mutant(
        "search a segment whose key index is bad",
        "KeyIndex.look_up",
        instead("return None", "return []", 1),
        _FAULTS,
    ),
    Mutant(
        "have a bad key index made again",
        "KeyIndex._distrust",
        skip("self.indexed.discard(base)"),
        _FAULTS,
    ),
    Mutant(
        "search what no filter covers yet",
        "KeySearch._ranges_of",
        never("known < part.high"),
        _FAULTS,
    ),
    Mutant(
        "find more of a segment than one step returns",
        "KeySearch._look_up",
        instead("len(found) < POSITIONS_A_STEP", "True"),
        _FAULTS,
    ),
    Mutant(
        "take a header behind bad bytes by its mark",
        "SegmentWalk._next_position",
        skip("validate_stored_header(found, candidate, self._secret, self._store_id)"),
        _WALK,
    ),
    Mutant(
        "find a header that the end of a read cuts",
        "SegmentWalk._next_position",
        never("len(found) < BATCH_HEADER_SIZE"),
        _WALK,
    ),
    Mutant(
        "make no key index of bytes that the disk did not read",
        "KeyIndexBuilder._stepped",
        never("found.unread", 1),
        _FAULTS,
    ),
    Mutant(
        "merge entries of one hash in the order of the log",
        "KeyIndexBuilder._merged",
        instead('"right" if number <= bounding else "left"', '"right"'),
        _FILE,
    ),
    Mutant(
        "leave a key index out where the room is kept",
        "KeyIndexBuilder._written",
        skip("self._check_room(sizes.file_bytes)"),
        _FAULTS,
    ),
    Mutant(
        "sync a key index before it gets its name",
        "KeyIndexBuilder._written",
        skip("disk.fsync(self._fd)"),
        _FAULTS,
    ),
    Mutant(
        "sync the name of a key index",
        "KeyIndexBuilder._written",
        skip("disk.fsync_directory(self.path.parent)"),
        _FAULTS,
    ),
    Mutant(
        "index all keys of a message",
        "hashes_in",
        never("flags & HAS_MORE_KEYS"),
        _HASHES,
    ),
    Mutant(
        "remove a key index with its segment",
        "Removals.clean_up",
        instead("keys_path(self._log, base)", "receipt_path(self._log, base)"),
        _FAULTS,
    ),
    Mutant(
        "remove a key index that was made too late",
        "KeyIndexer._built",
        skip("await self._thread.run(lambda: part.key_index.discard(base))"),
        _INDEXER,
    ),
    Mutant(
        "compare a key index with the log",
        "KeyCheck._compared",
        instead("np.array_equal(hashes[kept], wanted_hashes) and np.array_equal(offsets[kept], wanted)", "True"),
        _FAULTS,
    ),
    Mutant(
        "read a key index before it is archived",
        "_Run._copy_keys",
        skip("file.check_body()"),
        _ARCHIVE,
    ),
)
