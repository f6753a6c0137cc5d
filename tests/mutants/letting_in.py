"""The safeguards of tokens and rights."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import always, instead, never, skip

_ACCESS: Final = ("tests/broker/ports/test_access.py",)
_LOGINS: Final = ("tests/net/server/login/test_logins.py",)
_OVER_SOCKETS: Final = ("tests/daemon/test_token_file.py",)
_ENDS: Final = ("tests/daemon/test_token_ends.py",)
_FILE: Final = ("tests/test_tokens.py",)

OF_RIGHTS: Final = (
    Mutant("rights: check the subjects of a batch", "Intake.send", skip("rights.check_produce(batch.names)"), _ACCESS),
    Mutant(
        "rights: let no batch go the short way unchecked",
        "Intake._sender",
        never("number not in rights.numbers"),
        _ACCESS,
    ),
    Mutant(
        "rights: check again what goes the short way when rights change",
        "Intake.connected",
        skip("self._senders.clear()"),
        _ACCESS,
    ),
    Mutant("rights: a prefix ends at a dot", "names:takes", instead("name[: end + 1]", "name[:end]"), _ACCESS),
    Mutant("rights: an action without a row is for nobody", "_check_action", never("action is None"), _ACCESS),
    Mutant(
        "rights: pass on no field without a row",
        "_check_action",
        instead("command._replace(fields=fields)", "command"),
        _ACCESS,
    ),
    Mutant(
        "rights: get only what may be browsed",
        "GetMessages.message",
        never("rights is not None and not rights.may_browse(store.subjects.name(wanted.entry[3]))"),
        _ACCESS,
    ),
    Mutant(
        "rights: find only what may be browsed",
        "SubjectFilters.taken",
        instead("selection.takes(name) and (rights is None or rights.may_browse(name))", "selection.takes(name)"),
        _ACCESS,
    ),
    Mutant(
        "rights: trace only what may be browsed",
        "Traces._facts_within",
        always("facts.subject is not None and rights.may_browse(facts.subject)"),
        _ACCESS,
    ),
    Mutant(
        "rights: trace no place of what may not be browsed",
        "Traces._run",
        always("rights.may_browse(place.subject)"),
        _ACCESS,
    ),
    Mutant(
        "rights: cancel only what may be sent",
        "DelayedMessages._may_cancel",
        always("rights is None or takes(rights.produce, subject)"),
        _ACCESS,
    ),
    Mutant(
        "rights: show dead letters by subject",
        "_may_show",
        always("rights is None or rights.is_admin"),
        _ACCESS,
    ),
    Mutant(
        "rights: release before a takeover",
        "Delivery.subscribe",
        skip("self._release_before(command, rights)"),
        _ACCESS,
    ),
    Mutant(
        "tokens: release what a revoked one has", "CommandDispatch._disconnected", never("command.for_good"), _ACCESS
    ),
    Mutant(
        "tokens: compare the secret",
        "logins:_matches",
        always("sum(hmac.compare_digest(secret, digest) for secret in secrets) > 0"),
        _LOGINS,
    ),
    Mutant(
        "tokens: let in until they expire",
        "Logins.log_in",
        never("token.expires_us is not None and token.expires_us <= now_us"),
        _LOGINS,
    ),
    Mutant(
        "tokens: end a secret",
        "Logins.look_at",
        never("login.secret and not _matches(token.secrets, login.secret)"),
        _LOGINS,
    ),
    Mutant("tokens: end wider rights", "Logins.look_at", never("not token.rights.covers(login.rights)"), _LOGINS),
    Mutant("tokens: throttle failed logins", "FailedLogins.failed", always("number <= AT_ONCE"), _LOGINS),
    Mutant(
        "tokens: keep the old rules when the file is gone",
        "TokenFile._take",
        instead("self._has_tokens", "False", at=1),
        _OVER_SOCKETS,
    ),
    Mutant(
        "tokens: do not open to others", "read_at_start", never("open_hosts and not settings.insecure"), _OVER_SOCKETS
    ),
    Mutant(
        "tokens: end expired ones",
        "Server.look_at_logins",
        never("self._expiry_us is not None and self._expiry_us <= now_us"),
        _OVER_SOCKETS,
    ),
    Mutant(
        "tokens: end expired ones while a disk hangs",
        "TokenFile.start",
        skip("self._server.look_at_logins()"),
        _OVER_SOCKETS,
    ),
    Mutant(
        "tokens: a client that was let out logs in no more",
        "Link.lost",
        never("is_let_out and self._owner.is_hopeless(self, error)"),
        ("tests/net/client/test_broker_link.py",),
    ),
    Mutant(
        "tokens: warn of failed messages in the spool that a broker refuses",
        "HandoverClient._log_refusal",
        always("error.retryable or refusal in self._refused"),
        _ENDS,
    ),
    Mutant(
        "tokens: warn once of failed messages in the spool",
        "HandoverClient._log_refusal",
        skip("self._refused.add(refusal)"),
        _ENDS,
    ),
    Mutant(
        "tokens: send no more of a spool than was not taken before the token ended",
        "HandoverClient._replayed",
        never("left and left != todo[0].records"),
        _ENDS,
    ),
    Mutant("tokens: lock the file", "tokens:_locked", skip("fcntl.flock(descriptor, fcntl.LOCK_EX)"), _FILE),
)
