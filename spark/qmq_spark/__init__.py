"""QMQ for Spark: messages of a data directory, a broker or an archive as a DataFrame.

    import qmq_spark
    qmq_spark.register(spark)
    spark.read.format("qmq").load("/var/lib/qmq").groupBy("subject").count().show()

To read, it uses ``qmq.format`` and ``qmq.archive``, not the broker.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]


def register(spark: SparkSession) -> None:
    """Register ``format("qmq")`` in a session, with pushdown of filters for those who ask for it.

    If the whole session runs on this machine, and no Python is configured for Spark, it gets the one that runs this:
    the ``python3`` that Spark would start may have neither this package nor Arrow.
    """
    from qmq_spark.source import QmqDataSource

    context = getattr(spark, "sparkContext", None)  # a Spark Connect session has none
    named = "PYSPARK_PYTHON" in os.environ or spark.conf.get("spark.pyspark.python", None) is not None
    if context is not None and context.master.startswith("local") and not named:
        context.pythonExec = sys.executable
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(QmqDataSource)
