"""Messages of an archive in HDFS are found without a broker: by key, by text and by id."""

from __future__ import annotations

import json
from pathlib import Path

import qmq
from qmq.archive.hdfs_write import WritableHdfsFiles
from tests.broker_process import broker_process
from tests.cli.commands import qmq as run
from tests.hdfs.trees import archive


def test_messages_are_found_in_hdfs(tree: WritableHdfsFiles, tmp_path: Path) -> None:
    with broker_process(tmp_path) as broker, qmq.connect_sync(broker.url) as client:
        ids = [client.send("shop.order", b"order %d" % n, key=f"k-{n % 4}").id for n in range(40)]
        client.admin.roll()
    archive(tmp_path, tree)
    for arguments, wanted in (
        (("--key", "k-1"), ids[1::4]),
        (("shop.", "--key", "k-2", "--newest"), ids[2::4][::-1]),
        (("--contains", "order 33"), ids[33:34]),
        (("--id", ids[7]), ids[7:8]),
    ):
        shown = run("find", *arguments, "--json", "--data", tree.name)
        assert (shown.exit_code, shown.stderr) == (0, "")
        assert [json.loads(line)["id"] for line in shown.stdout.splitlines()] == wanted
