"""Servers: descendants, memory, time that they ran and waited; they end, or say why they did not start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.peers.processes import Server, answers, descendants, free_ports
from qmq.bench.values import BenchFailed

PARENT = """
import subprocess, sys, pathlib
child = subprocess.Popen([sys.executable, "-c", "import sys; bytes(1); print('here', flush=True); sys.stdin.read()"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
pathlib.Path("ready").write_text(str(child.pid))
child.wait()
"""


def test_a_server_is_all_its_processes(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    with Server("a server", tmp_path, {"address": "here"}) as server:
        server.run([sys.executable, "-c", PARENT])
        server.wait_until(lambda: ready.exists() and ready.read_text("ascii") != "")
        child = int(ready.read_text("ascii"))
        pids = server.pids()
        assert child in pids
        assert len(pids) == 2
        memory = server.memory()
        assert memory.own > 2 << 20
        assert memory.file > 0
        assert server.cpu_s() >= 0
        used = server.processor_time()
        assert used.ran_s > 0
        assert 0 <= used.waited_s < 60
        assert server.ready_after_s > 0
    assert descendants({child}) == set()
    assert server.memory() == (0, 0)


def test_a_server_that_ends_early_leaves_its_last_words(tmp_path: Path) -> None:
    server = Server("a server", tmp_path, {})
    server.run([sys.executable, "-c", "raise SystemExit('no such setting')"])
    with pytest.raises(BenchFailed, match="a server ended with 1; its last words: no such setting"):
        server.wait_until(lambda: False)


def test_a_server_that_never_serves_is_ended(tmp_path: Path) -> None:
    server = Server("a server", tmp_path, {})
    server.run([sys.executable, "-c", "import signal; signal.pause()"])
    (pid,) = server.pids()
    with pytest.raises(BenchFailed, match="a server did not serve within 0 s; it printed nothing"):
        server.wait_until(lambda: False, timeout_s=0.0)
    assert descendants({pid}) == set()


def test_ports_are_free_and_different(tmp_path: Path) -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    assert not any(map(answers, ports))
