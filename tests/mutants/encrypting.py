"""Safeguards of connections by TLS."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import instead, never, skip

_ORDER: Final = ("tests/net/server/test_tls_order.py",)

OF_TLS: Final = (
    Mutant(
        "bound how many handshakes are unfinished",
        "Handshakes.begin",
        never("len(self._begun) > self._most"),
        ("tests/net/server/test_tls.py",),
    ),
    Mutant(
        "answer the newest hello first",
        "Handshakes._answer",
        instead("self._ready.popitem()", "(first := next(iter(self._ready)), self._ready.pop(first))"),
        _ORDER,
    ),
    Mutant(
        "do no handshake of a client that has left",
        "Handshakes._answer",
        never("channel.is_gone()"),
        _ORDER,
    ),
    Mutant(
        "leave most of the loop to those who are served while handshakes are not done",
        "Handshakes._answer",
        never("now < min(self._paid_at, self._busy_until)"),
        _ORDER,
    ),
    Mutant(
        "give handshakes that are done more of the loop",
        "Handshakes.done",
        skip("self._paid_at -= cost_s * (_PAUSED_FOR - _PAUSED_FOR_DONE)"),
        _ORDER,
    ),
    Mutant(
        "bound the time of a handshake",
        "Handshakes._too_long",
        skip("channel.abort()"),
        ("tests/net/server/test_tls.py",),
    ),
    Mutant(
        "refuse who does not speak TLS",
        "TlsChannel.buffer_updated",
        never("received[0] != HANDSHAKE_RECORD"),
        ("tests/net/server/test_tls.py",),
    ),
    Mutant(
        "count what a client by TLS has not read",
        "TlsChannel.get_write_buffer_size",
        instead("self._raw.get_write_buffer_size() if self._raw is not None else 0", "0"),
        ("tests/net/server/test_tls.py", "tests/net/server/test_connection_tls.py"),
    ),
    Mutant(
        "stop reading by TLS from who does not read",
        "TlsChannel.pause_reading",
        skip("self._is_paused = True"),
        ("tests/net/server/test_tls.py",),
    ),
    Mutant(
        "check the broker's certificate and its name",
        "context:_make",
        instead(
            "ssl.create_default_context(cafile=files.ca or None)",
            "ssl._create_unverified_context(cafile=files.ca or None)",
        ),
        ("tests/net/client/test_tls.py",),
    ),
    Mutant(
        "ask every client for a certificate",
        "ServerCertificates._load",
        skip("context.verify_mode = ssl.CERT_REQUIRED"),
        ("tests/net/server/test_certificates.py",),
    ),
    Mutant(
        "leave the old certificate when the new one has expired",
        "ServerCertificates.look",
        skip("raise InvalidOption(wrong)"),
        ("tests/net/server/test_certificates.py",),
    ),
    Mutant(
        "take new files only once they stay the same",
        "ServerCertificates.look",
        instead("state == self._seen", "True"),
        ("tests/net/server/test_certificates.py",),
    ),
    Mutant(
        "do not try for ever where trust is missing",
        "Link._reconnect",
        instead("self._loop.time() < tls_until", "True"),
        ("tests/net/client/test_tls.py",),
    ),
)
