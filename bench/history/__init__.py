"""Messages in Spark, in HDFS and as Parquet, and how fast: see bench/README.md."""
