"""Messages come back from an archive in HDFS, with progress kept there."""

from __future__ import annotations

from pathlib import Path

from qmq.archive.hdfs_read import HdfsFiles
from qmq.archive.hdfs_write import WritableHdfsFiles
from qmq.archive.lock import this_process
from qmq.net.client.address import parse_url
from qmq.restore.run import RestoreRun
from qmq.restore.selection import RestoreSelection
from tests.archive.archives import NOW_US
from tests.archive.orders import write_orders
from tests.broker_process import running_broker
from tests.hdfs.trees import archive
from tests.restore.archived import check_restored, told
from tests.spark.parquet.archives import archive_to, write_days


async def test_every_message_comes_once_of_either_form(tree: WritableHdfsFiles, tmp_path: Path) -> None:
    write_orders(tmp_path / "a", 40)
    write_days(tmp_path / "b", 1, 5, seed=2)
    archive(tmp_path / "a", tree)
    archive_to(tmp_path / "b", tree)
    wanted = [*told(tmp_path / "a", partitions=2), *told(tmp_path / "b", partitions=2)]
    async with running_broker(tmp_path / "target") as url:
        for _ in range(2):
            source = HdfsFiles(tree.name)
            restoring = RestoreRun(
                tree, RestoreSelection(), parse_url(url), lambda: NOW_US, this_process(), source=source
            )
            assert (await restoring.run()).counts.restored == len(wanted)
    check_restored(wanted, tmp_path / "target")
    assert [name.rpartition(".")[2] for name in tree.names("restores")] == ["progress"]
