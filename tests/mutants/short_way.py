"""The guards of the short way: without one of them, it would do what only the general way may."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import Change, always, instead, never, skip

_BOTH_WAYS: Final = ("tests/broker/test_short_way.py",)
_LIES: Final = ("tests/format/test_batch_lies.py",)


def _guard(name: str, symbol: str, *changes: Change) -> Mutant:
    return Mutant(f"short way: {name}", symbol, changes, _BOTH_WAYS)


OF_SHORT_WAY: Final = (
    # --- a batch ------------------------------------------------------------------------------------------------------
    Mutant(
        "short way: check the header",
        "check_plain",
        never("crc32c(view[BATCH_HEADER_SIZE:data_start], crc32c(view[:BATCH_PREFIX_SIZE])) != header_crc"),
        _LIES,
    ),
    Mutant("short way: check the data", "check_plain", never("crc32c(data) != data_crc"), _LIES),
    Mutant("short way: check the size of a lone message", "check_plain", never("length > max_message_bytes"), _LIES),
    Mutant("short way: check the lone length", "check_plain", never("length != run_size - columns"), _LIES),
    Mutant("short way: take no mark", "check_plain", never("mark"), _LIES),
    Mutant("short way: check the lengths", "_fits_columns", always("total == size - count * columns"), _LIES),
    _guard("take nothing once the broker stops", "ShortWay.send", never("not self._is_open")),
    _guard("take no repeat", "Intake.take_one", never("sequence < producer.next_sequence")),
    _guard("do not overtake a staged batch", "Intake.take_one", never("partition.staged")),
    _guard("do not overtake a refused batch", "Intake.take_one", never("self._refusals.by_producer")),
    _guard("take nothing after a failed sync", "MessageLog.write_one", never("self.broken is not None")),
    _guard("leave a batch as it was", "Intake.take_one", skip("view[:data_start] = before")),
    _guard("stamps go on", "Intake.take_one", always("wall_us > stored_at_us")),
    _guard("hide what is not synced", "Intake.take_one", skip("partition.hide(Barrier(position, end, True, ()))")),
    _guard("do not cross the end of a segment", "Partition.write_one", never("log.end + size > log.limit")),
    _guard("remove what a failed write left", "MessageLog.write_one",
           skip('self._clean_up(failure(error, "write", segment.path, position))')),
    _guard("ask for the sync that a batch waits for", "ShortWay.send", skip("self.is_sync_wanted = True")),
    # --- a pull that waits --------------------------------------------------------------------------------------------
    _guard("hand nothing to a group that has changed", "ShortWay._hand",
           never("subscription.plain_at != ledger.version")),
    _guard("hand as many as are wanted", "ShortWay._hand", never("not least <= count <= most")),
    _guard("keep max_pull_count", "ShortWay._hand", never("count > self._most_count")),
    _guard("keep the bytes of a pull", "ShortWay._hand", never("answer > most_bytes")),
    _guard("keep max_pull_bytes", "ShortWay._hand", never("answer > self._most_bytes")),
    _guard("keep max_unacked", "ShortWay._hand", never("start + count - in_flight.ack_floor > settings.max_unacked")),
    _guard("keep max_unacked_bytes", "ShortWay._hand", never("in_flight.size + answer > settings.max_unacked_bytes")),
    _guard("hand out in order", "SubjectFilter.pass_run", never("first != cursor"),
           never("self.row_cursors[0] != row or first < cursor")),
    _guard("hand out all that is passed", "SubjectFilter.pass_run", never("end - first != total")),
    _guard("note that a consumer lives", "ShortWay._hand", skip("member.seen_us = monotonic_us")),
    _guard("read on behind the last row", "SubjectFilter.pass_run", skip("self.row_cursors[0] = row + 1")),
    _guard("wake the others", "ShortWay.send", skip("arrivals.wake(subject_filter, 0, entry)")),
    _guard("let no pull come before one that is left to the turn", "ShortWay.send", always("not self.is_unfinished")),
    _guard("write the records of all pulls at once", "ShortWay._write", always("not self.is_unfinished")),
    _guard("answer when the record is written", "ShortWay._write", skip("self._store.groups.write()")),
    _guard("keep answers back while the disk is full", "ShortWay._write", skip("self.is_unfinished = True")),
    _guard("keep the bytes of answers that wait", "ShortWay._write", instead("[*acks, *kept]", "[*acks, *handed]")),
    # --- an ack, and the next pull ------------------------------------------------------------------------------------
    _guard("ack nothing of a group that has changed", "ShortWay.ack", never("subscription.plain_at != ledger.version")),
    _guard("wake a pull that has room again", "ShortWay.ack", never("connection in self._waiting_pulls.by_connection")),
    _guard("ack only what is next", "ShortWay.ack", never("not member.in_flight.is_next(start, end)")),
    _guard("check an ack", "SmallFrames._take_of_consumer", never("crc32c(view[at + _ACKED : behind]) != crc")),
    _guard("let no wrong pull wait", "ShortWay._pull", never("not 1 <= most >= least")),
    _guard("answer a pull that does not wait", "ShortWay._pull", never("timeout_ms < LEAST_TIMEOUT_MS")),
    _guard("see what a consumer expects", "ShortWay._pull",
           never("(expected is not None and expected != member.in_flight.next_sequence)")),
    _guard("let no pull wait while there is more", "ShortWay._pull",
           never("subscription.filters[0].has_more(self._store)")),
    _guard("keep max_unacked of a pull that finds more", "ShortWay._answer",
           instead("min(pull.max_count, self._most_count, room)", "min(pull.max_count, self._most_count)")),
    _guard("keep max_pull_count of a pull that finds more", "ShortWay._answer",
           instead("min(pull.max_count, self._most_count, room)", "min(pull.max_count, room)")),
    _guard("keep the bytes of a pull that finds more", "ShortWay._answer",
           instead("min(pull.max_bytes, self._most_bytes, room_bytes)", "room_bytes")),
    _guard("wait for as many as are wanted", "PullServer.answer_at_once", instead("max(pull.min_count, 1)", "1")),
    _guard("leave a read to the general way", "PullServer.answer_at_once", never("selection.wanted is not None")),
    # --- what is plain ------------------------------------------------------------------------------------------------
    _guard("a group with tags is not plain", "Ledger.is_plain",
           instead("settings.tags or settings.expire_after_us or settings.ack_deadline_us",
                   "settings.expire_after_us or settings.ack_deadline_us")),
    _guard("a group with retries is not plain", "Ledger.is_plain", always("self.retries.is_blank")),
    _guard("a consumer of two prefixes is not plain", "Subscription.note_plain", always("len(self.filters) == 1")),
    _guard("a record changes the group", "Ledger._do", skip("self.version += 1")),
    # --- the server ---------------------------------------------------------------------------------------------------
    _guard("answer what joins only once", "ReplyWriter.answer_at_once", never("acks[0].refused")),
    _guard("answer acks in time", "Server._look", never("due is not None and due < deadline")),
    _guard("a turn looks after what is left", "Server.small_frames", never("small.rules.is_unfinished")),
)  # fmt: skip
