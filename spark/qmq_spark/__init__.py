"""QMQ for Spark: messages of a data directory or an archive as a DataFrame.

    import qmq_spark
    qmq_spark.register(spark)
    spark.read.format("qmq").load("/var/lib/qmq").groupBy("subject").count().show()

Of QMQ it sees the format, and segments as ``qmq.archive`` finds them: no broker, no sockets.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]


def register(spark: SparkSession) -> None:
    """Make ``format("qmq")`` known to a session, with filters on subject and time pushed down to it.

    Where all of the session runs on this machine, and nobody has said which Python Spark is to start, it is this one:
    the ``python3`` that Spark would take may know neither this package nor Arrow.
    """
    from qmq_spark.source import QmqDataSource

    context = getattr(spark, "sparkContext", None)  # one that is connected to has none
    named = "PYSPARK_PYTHON" in os.environ or spark.conf.get("spark.pyspark.python", None) is not None
    if context is not None and context.master.startswith("local") and not named:
        context.pythonExec = sys.executable
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(QmqDataSource)
