"""A scan of a broker's TLS port by a program that looks for what is wrong with servers: sslyze."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sslyze import (
    ScanCommand,
    ScanCommandAttemptStatusEnum,
    Scanner,
    ServerNetworkLocation,
    ServerScanRequest,
    ServerScanResult,
)

from tests.broker_process import broker_process
from tests.certificates import TlsFilesOfTests

OLD = ("ssl_2_0", "ssl_3_0", "tls_1_0", "tls_1_1")
VERSIONS = tuple(f"{version}_cipher_suites" for version in (*OLD, "tls_1_2", "tls_1_3"))
OTHERS = (
    "heartbleed", "openssl_ccs_injection", "robot", "tls_compression", "session_renegotiation", "session_resumption",
    "tls_fallback_scsv", "tls_1_3_early_data",
)  # fmt: skip


def scanned(port: int) -> ServerScanResult:
    scanner = Scanner()
    location = ServerNetworkLocation("localhost", port, "127.0.0.1")
    commands = {ScanCommand(name) for name in (*VERSIONS, *OTHERS)}
    scanner.queue_scans([ServerScanRequest(location, scan_commands=commands)])
    (result,) = scanner.get_results()
    return result


def test_a_scan_of_the_tls_port_finds_nothing(tmp_path: Path) -> None:
    files = TlsFilesOfTests.make(tmp_path / "tls")
    with broker_process(tmp_path / "data", **files.settings) as broker:
        scan = scanned(int(broker.url.rpartition(":")[2])).scan_result
        assert broker.stop() == 0
        broker.start()
    assert scan is not None
    found: dict[str, Any] = {}
    for name in (*VERSIONS, *OTHERS):
        attempt = getattr(scan, name)
        assert attempt.status == ScanCommandAttemptStatusEnum.COMPLETED, (name, attempt.error_trace)
        found[name] = attempt.result
    for version in OLD:
        assert found[f"{version}_cipher_suites"].accepted_cipher_suites == [], version
    for version in ("tls_1_2", "tls_1_3"):
        accepted = found[f"{version}_cipher_suites"].accepted_cipher_suites
        assert accepted
        for suite in accepted:
            assert not suite.cipher_suite.is_anonymous
            assert suite.cipher_suite.key_size >= 128
            assert suite.ephemeral_key is not None, f"{suite.cipher_suite.name} has no forward secrecy"
    assert not found["heartbleed"].is_vulnerable_to_heartbleed
    assert not found["openssl_ccs_injection"].is_vulnerable_to_ccs_injection
    assert found["robot"].robot_result.name.startswith("NOT_VULNERABLE")
    assert not found["tls_compression"].supports_compression
    assert not found["session_renegotiation"].is_vulnerable_to_client_renegotiation_dos
    assert found["session_renegotiation"].supports_secure_renegotiation
    assert found["session_resumption"].session_id_resumption_result.name == "NOT_SUPPORTED"
    assert found["session_resumption"].tls_ticket_resumption_result.name == "NOT_SUPPORTED"
    assert found["tls_fallback_scsv"].supports_fallback_scsv
    assert not found["tls_1_3_early_data"].supports_early_data
