"""Measure Spark, archives in HDFS and Parquet: see bench/README.md."""
