"""QMQ for Spark: messages of a data directory or an archive as a DataFrame.

    import qmq_spark
    qmq_spark.register(spark)
    spark.read.format("qmq").load("/var/lib/qmq").groupBy("subject").count().show()

Of QMQ it sees the format, and segments as ``qmq.history`` finds them: no broker, no sockets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]


def register(spark: SparkSession) -> None:
    """Make ``format("qmq")`` known to a session, with filters on subject and time pushed down to it."""
    from qmq_spark.source import QmqDataSource

    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(QmqDataSource)
