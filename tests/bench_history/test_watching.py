"""Measuring the memory and processor time of processes."""

from __future__ import annotations

import subprocess
import sys
import time

from bench.history.watching import Memory, cpu_s


def test_counts_processes_that_have_ended() -> None:
    before = cpu_s()
    burn = "import time; b = time.process_time()\nwhile time.process_time() - b < 0.2: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert cpu_s() - before > 0.15


def test_sees_the_memory_of_children() -> None:
    grow = "import sys; held = bytearray(64 << 20); print(flush=True); sys.stdin.read()"
    memory = Memory()
    with memory.watched(), subprocess.Popen([sys.executable, "-c", grow], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        child.stdout.readline()
        deadline = time.monotonic() + 60
        while max(memory.most.values(), default=0) < 64 << 20 and time.monotonic() < deadline:
            time.sleep(0.01)
        child.communicate()
    assert max(memory.most.values()) >= 64 << 20
