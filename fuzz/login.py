"""Frames into a broker that has tokens: before HELLO, with wrong and right tokens, and while tokens end."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgpack

from fuzz.core import Core, Wire
from fuzz.target import Picks
from fuzz.wire import Wires
from qmq.broker.ports.access import ACTIONS
from qmq.broker.ports.rights import Need, Rights
from qmq.format.build import RunContent, build_batch
from qmq.format.pieces import read_answer
from qmq.format.source import new_source
from qmq.net.protocol import frames
from qmq.net.protocol.frames import Frame, FrameKind
from qmq.net.server.login.failed_logins import MOST_US
from qmq.net.server.login.logins import Token

#: Nobody guesses these: the broker compares their hashes.
_SECRETS: Final = {name: f"qmq_{hashlib.sha256(name.encode()).hexdigest()}" for name in ("good", "few", "none")}
_SECOND: Final = f"qmq_{hashlib.sha256(b'second').hexdigest()}"
_EXPIRES_S: Final = 5
#: By then even the last of many failed logins was answered.
_ANSWERED_S: Final = 1 + MOST_US / 1e6
_TOKENS: Final = (
    *(f"{name}:{secret}" for name, secret in _SECRETS.items() if name != "good"),
    f"few:{_SECOND}",
    "",
    "few:",
    "few",
    f"none:{_SECRETS['few']}",
    f":{_SECRETS['few']}",
    "\udcff:é",
    "x" * 20_000,
)
_SUBJECTS: Final = ("a.b", "a.c", "m.x1", "b.a", "a")
_ADMIN_ACTIONS: Final = tuple(sorted(ACTIONS))
_GROUPS: Final = ("g", "h", "bad group", "", 5, None)
#: Answers to what a token needs all of browse or admin for.
_FOR_OTHERS: Final = frozenset((FrameKind.SEGMENT_LIST, FrameKind.BATCH_LIST, FrameKind.LOG_BYTES, FrameKind.RESTORED))


def _hello(token: object) -> bytes:
    fields = {"protocol": frames.PROTOCOL_VERSION, "client": "fuzz", "token": token}
    packed: bytes = msgpack.packb(fields, unicode_errors="surrogatepass")
    return packed


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


class TokenWires(Wires):
    """Untrusted clients with a token that may do little, one that may do nothing, and wrong ones."""

    _good_hello = _hello(f"good:{_SECRETS['good']}")

    def __init__(self) -> None:
        super().__init__()
        acts = list(self._acts)
        acts[14], acts[15] = self._administer, self._change
        self._acts = tuple(acts)
        self._valid: set[str] = set()
        self._sent = 0
        self._first_token: dict[Wire, str] = {}  # of its first HELLO; empty when it was not valid then
        self._actions: dict[tuple[Wire, int], str] = {}

    def _begin(self, core: Core) -> None:
        self._set(core, 0b111)

    def _end(self) -> None:
        assert self._core is not None
        self._core.run()
        self._core.loop.advance(_ANSWERED_S)
        super()._end()
        self._first_token.clear()
        self._actions.clear()
        self._set(self._core, 0b111)

    def _set(self, core: Core, which: int) -> None:
        """Have the broker take other tokens: the bits of *which* say those of few, whose first secret holds, and
        whether few has expired by now.
        """
        now_us = core.loop.now().wall_us
        tokens = {"good": Token(Rights("good", is_admin=True), (_digest(_SECRETS["good"]),))}
        self._valid = set()
        if which & 1:
            secrets = (_SECRETS["few"], _SECOND) if which & 2 else (_SECOND,)
            rights = Rights("few", produce=("a.",), consume=("a.",), group=("g",), browse=("a.",))
            expires_us = None if which & 4 else now_us + _EXPIRES_S * 1_000_000 * (which >> 3 & 1)
            tokens["few"] = Token(rights, tuple(map(_digest, secrets)), expires_us)
            if which & 12:
                self._valid |= {f"few:{secret}" for secret in secrets}
        tokens["none"] = Token(Rights("none"), (_digest(_SECRETS["none"]),))
        self._valid.add(f"none:{_SECRETS['none']}")
        core.server.set_tokens(tokens)
        core.server.look_at_logins()
        core.run()
        in_use = core.server.tokens_in_use()
        assert in_use <= {"good", *(token.partition(":")[0] for token in self._valid)}, in_use

    # --- what they do ------------------------------------------------------------------------------------------------

    def _hello(self, picks: Picks, untrusted: Wire) -> None:
        how = picks.number(1)
        token = _TOKENS[how % len(_TOKENS)]
        meta = bytearray(_hello(picks.number(2) if how & 64 else token))
        if how & 128:
            picks.edit(memoryview(meta)[:40])  # the keys and the name, and no byte of a secret
        is_valid = token in self._valid and not how & 64
        self._first_token.setdefault(untrusted, token if is_valid else "")
        self._put(untrusted, FrameKind.HELLO, 1, bytes(meta), b"")

    def _batch(self, picks: Picks, untrusted: Wire) -> None:
        how = picks.number(1)
        if how & 128:
            super()._batch(picks, untrusted)
            return
        subjects = dict.fromkeys(_SUBJECTS[(how >> shift & 7) % len(_SUBJECTS)] for shift in range(1 + (how & 1) * 3))
        self._sent += 1
        parts = build_batch(
            [RunContent(subject, [b"body"], None) for subject in subjects],
            created_at_us=1,
            producer_id=bytes(16),
            producer_sequence=self._sent,
            source=new_source(sender_bytes=picks.number(1) % 9),
        )
        self._put(untrusted, FrameKind.SEND, 1 + picks.number(1), b"", b"".join(parts), frames.FLUSH * (how & 1))

    def _administer(self, picks: Picks, untrusted: Wire) -> None:
        action, choice = _ADMIN_ACTIONS[picks.number(1) % len(_ADMIN_ACTIONS)], picks.number(1)
        fields: dict[str, Any] = {"action": action, "group": _GROUPS[choice % len(_GROUPS)]}
        if choice & 64:
            fields |= {name: picks.number(1) for name in ACTIONS[action].fields if name != "group"}
        meta = memoryview(bytearray(msgpack.packb(fields)))
        request = 1_000 + self.frames  # no other act has this number
        if choice & 128:
            picks.edit(meta)
        else:
            self._actions[untrusted, request] = action
        self._put(untrusted, FrameKind.ADMINISTER, request, bytes(meta), b"")

    def _change(self, picks: Picks, untrusted: Wire) -> None:
        """Some tokens end, or come back."""
        assert self._core is not None
        self._core.run()
        which = picks.number(1)
        if which & 128:
            self._core.loop.advance((which & 127) / 10)
            self._core.server.look_at_logins()
        else:
            self._set(self._core, which)

    # --- what they may be told ---------------------------------------------------------------------------------------

    def _check(self, untrusted: Wire, frame: Frame) -> None:
        super()._check(untrusted, frame)
        if frame.kind == FrameKind.ERROR:
            return
        given = self._first_token.get(untrusted)
        assert given, f"without a valid token it was told {FrameKind(frame.kind).name}"
        assert frame.kind not in _FOR_OTHERS, FrameKind(frame.kind).name
        if frame.kind == FrameKind.ADMINISTERED:
            action = self._actions.get((untrusted, frame.request))
            assert action is None or ACTIONS[action].need is not Need.ADMIN, action
        elif frame.kind == FrameKind.MESSAGES:
            runs, _ = read_answer(frame.payload)
            assert all(run.subject.startswith("a.") for run in runs)
            assert given.startswith("few:")

    def seeds(self) -> list[bytes]:
        few, none, second = b"\x81\x00", b"\x81\x01", b"\x81\x02"
        subscribe = b"\x87\x01\x00\x01\x00\x00\x05"
        send, pull = b"\x83\x00\x04\x05", b"\x85\x00\xff\x01\xff\xff\x00\x05"
        revoke, expire, restore = b"\x8f\x00", b"\x8f\x09\x8f\xff", b"\x8f\x07"
        stories = [
            few + send + subscribe + pull,
            few + subscribe + pull + revoke + pull + few,
            few + subscribe + send * 3 + pull + expire + pull + few + restore,
            second + send + b"\x8f\x05" + send + few,
            none + send + subscribe + pull,
            send + subscribe + few,
            b"\x80\x10" + bytes(16) + few,
            *(bytes([0x81, how]) for how in range(3, len(_TOKENS))),
            *(bytes([0x81, how]) + few + send for how in range(3, len(_TOKENS))),
        ]
        stories += [few + b"\x8e" + bytes([action, 0]) + none for action in range(len(_ADMIN_ACTIONS))]
        stories += [
            few + send + bytes([0x84, number, 0, how, 1, 30, 0, 7, 3]) for number in range(9) for how in (0, 7, 14)
        ]
        stories += [b"\x81" + bytes([how]) + b"\x03\x08\x40\x02\x00\x10" for how in (64, 128, 130, 192)]
        return stories
