"""Safeguards of groups that are seen and changed."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import always, instead, never, skip

OF_GROUPS: Final = (
    Mutant(
        "count what comes again by its size in the window",
        "Redelivery.redeliver",
        instead("size", "max_bytes"),
        ("tests/broker/test_cases.py",),
    ),
    Mutant(
        "refuse calls for a deleted group by its name",
        "Subscriptions.get",
        never("name is not None and self.groups.get(name) is not subscription.group"),
        ("tests/broker/test_admin.py",),
    ),
    Mutant(
        "make the row of a group anew when its subjects get messages",
        "_PrefixSums.of",
        skip("total += int(subjects.ends[piece].sum()) + _FIRSTS * int(subjects.firsts[piece].sum())"),
        ("tests/broker/test_stats.py",),
    ),
    Mutant(
        "make the row of a group anew when something of it has changed",
        "GroupStatistics._known_row",
        instead("known.key == key", "True"),
        ("tests/broker/test_stats.py",),
    ),
    Mutant(
        "do not make the rows of busy groups anew at every look",
        "GroupStatistics._known_row",
        instead("known.made_us <= made_by_us", "True"),
        ("tests/broker/test_stats.py",),
    ),
    Mutant(
        "count what is in retry among the oldest",
        "GroupStatistics._row",
        instead("min(oldest, retried_us)", "oldest"),
        ("tests/broker/test_stats.py",),
    ),
    Mutant(
        "keep no statistics back for files that cannot be looked at",
        "FileSurvey.ask",
        instead("TIMEOUT_S", "3_600"),
        ("tests/daemon/test_file_survey.py",),
    ),
    Mutant(
        "do not look at all files for every answer",
        "FileSurvey.ask",
        instead("self._clock().monotonic_us < self._rest_until_us", "False"),
        ("tests/daemon/test_file_survey.py",),
    ),
    Mutant(
        "sum the groups beyond those that metrics name",
        "_NamedSeries.choose",
        instead("names[: self._most]", "names"),
        ("tests/console/test_metrics.py",),
    ),
    Mutant(
        "name the groups that are behind before others",
        "_NamedGroups.choose_groups",
        instead("sorted(groups, key=place)", "groups"),
        ("tests/console/test_metrics.py",),
    ),
    Mutant(
        "say that a row which stays the same is true now",
        "GroupStatistics._known_row",
        skip("known.row[_AT] = now.wall_us"),
        ("tests/broker/test_stats.py",),
    ),
    Mutant(
        "tell messages that have failed from those that came back untried",
        "Retries._change",
        always("attempt > 1"),
        ("tests/broker/test_stats.py",),
    ),
    Mutant(
        "count the sessions that ended with the same messages",
        "Setbacks.crashes",
        instead("_have_common(one, last)", "one is last"),
        ("tests/broker/test_stats.py",),
    ),
    Mutant(
        "show the answer of a broker that was away at once",
        "Watch._answered",
        never("broker in self._away and not task.cancelled()"),
        ("tests/console/test_watch.py",),
    ),
    Mutant(
        "say that the disk is full until there is room for what was refused",
        "FreeSpace.take",
        always("self.refused_bytes - size <= room"),
        ("tests/storage/disk/test_free_space.py",),
    ),
    Mutant(
        "let counters go on when a broker starts again",
        "_Counters.look_at",
        skip("self._restarted.add(one.broker)"),
        ("tests/console/test_metrics.py",),
    ),
    Mutant(
        "give metrics to who may browse everything only",
        "metrics:routes",
        never("not request.state.session.sees_all"),
        ("tests/console/test_metrics.py",),
    ),
    Mutant(
        "close the client of a sign-in that is cancelled",
        "Sessions.sign_in",
        skip("await session.close()"),
        ("tests/console/test_sign_in.py",),
    ),
    Mutant(
        "change nothing without the token of a page",
        "security:_refusal",
        never("not is_same and not session.is_bearer"),
        ("tests/console/test_sign_in.py",),
    ),
    Mutant(
        "change nothing for a page of another site",
        "security:_refusal",
        never("not _is_own_origin(request)"),
        ("tests/console/test_sign_in.py",),
    ),
    Mutant(
        "offer no change to a token that may only look",
        "security:_refusal",
        never("path not in NO_RIGHT and not session.may(needs)"),
        ("tests/console/test_sign_in.py",),
    ),
    Mutant(
        "change all dead letters only with their count of now",
        "api:_check_count",
        never("typed != there"),
        ("tests/console/test_sign_in.py",),
    ),
    Mutant(
        "answer no name of others where nobody signs in",
        "KnownHost.__call__",
        never("not is_loopback(host_of(request.headers.get('host', '')))"),
        ("tests/console/test_serve.py",),
    ),
    Mutant(
        "show nothing to a network where nobody signs in",
        "check_listen",
        never("not needs_token(parse_url(servers))"),
        ("tests/console/test_serve.py",),
    ),
    Mutant(
        "begin the counts of statistics after what a start replays",
        "Broker.__init__",
        skip("ledger.counts.clear()"),
        ("tests/broker/test_stats.py",),
    ),
    Mutant(
        "keep the counts of a group that is deleted",
        "DeliveryTracker.forget",
        skip("self.ended.add(ledger.counts)"),
        ("tests/broker/test_stats.py",),
    ),
    Mutant(
        "look at cursors without making room for them",
        "Cursors.of",
        instead("int(numbers.max()) < len(column)", "self._have_column(numbers)"),
        ("tests/broker/test_stats.py",),
    ),
    Mutant(
        "leave gaps out of what is ready",
        "SubjectTable.messages_of",
        instead("messages - int(np.maximum(high - low, 0).sum())", "messages"),
        ("tests/storage/meta/test_subjects.py",),
    ),
    Mutant(
        "name the brokers that a list lacks",
        "Listing.begin",
        instead("missed", "[]", at=2),
        ("tests/net/client/admin/test_admin.py",),
    ),
    Mutant(
        "name a broker that goes while a list is read",
        "Listing.page",
        skip("self.lacks([*self.missed, str(link.address)])"),
        ("tests/net/client/admin/test_admin.py",),
    ),
    Mutant(
        "do nothing to all where nobody can be asked",
        "confirm",
        never("not can_ask()"),
        ("tests/cli/common/test_confirm.py",),
    ),
    Mutant(
        "take no ids for none of the dead letters",
        "_check_ids",
        never("every is bool(ids)"),
        ("tests/cli/common/test_confirm.py",),
    ),
    Mutant(
        "keep sockets off the standard descriptors",
        "prepare_streams",
        skip("os.open(os.devnull, flags)"),
        ("tests/cli/common/test_standard_streams.py",),
    ),
)
