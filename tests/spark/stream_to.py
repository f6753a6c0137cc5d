"""Stream a source to files, and report each micro-batch: a program to be killed.

python -m tests.spark.stream_to SOURCE TO
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.spark.session import running


def main(source: str, to: Path) -> None:
    """Write small micro-batches, one after another."""
    with tempfile.TemporaryDirectory() as directory, running(Path(directory)) as spark:
        frame = spark.readStream.format("qmq").option("max_trigger_bytes", 5_000).load(source)
        writer = frame.writeStream.format("parquet").option("checkpointLocation", str(to / "checkpoint"))
        query = writer.trigger(processingTime="1 millisecond").start(str(to / "rows"))
        told = -1
        while query.isActive:
            progress = query.lastProgress
            for batch in range(told + 1, (progress["batchId"] if progress else told) + 1):
                print(f"batch {batch}", flush=True)
                told = batch
            time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
