"""A program that is packed into one file, without the metadata that pip installs."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np

import qmq
from qmq.version import VERSION
from tests.broker_process import broker_process

PROGRAM = """
import sys
sys.path[:0] = sys.argv[1:3]
import asyncio, importlib.metadata, qmq
try:
    sys.exit(f"qmq {importlib.metadata.version('qmq')} is installed")
except importlib.metadata.PackageNotFoundError:
    assert ".zip" in qmq.__file__
with qmq.connect_sync(sys.argv[3]) as client:
    client.send("a.b", b"1")
    client.admin.info()
async def main():
    async with qmq.connect(sys.argv[3]) as client:
        await client.send("a.b", b"1")
asyncio.run(main())
from qmq.net.client.address import parse_url
from qmq.net.client.blocking import ping
print(ping(parse_url(sys.argv[3])[0], 10).version)
"""


def test_a_client_needs_no_metadata_of_its_package(tmp_path: Path) -> None:
    packed, packages = tmp_path / "program.zip", tmp_path / "packages"
    root = Path(qmq.__file__).parent
    with zipfile.ZipFile(packed, "w") as file:
        for path in root.rglob("*.py"):
            file.write(path, path.relative_to(root.parent))
    packages.mkdir()
    for path in Path(np.__file__).parent.parent.iterdir():
        if "qmq" not in path.name and path.suffix != ".pth":
            (packages / path.name).symlink_to(path)
    with broker_process(tmp_path / "data") as broker:
        command = [sys.executable, "-S", "-c", PROGRAM, str(packed), str(packages), broker.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{VERSION}\n"
