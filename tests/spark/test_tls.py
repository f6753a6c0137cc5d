"""Spark reads and writes brokers by TLS, with the files that its options name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from qmq.errors import InvalidOption
from qmq_spark.options import read_options
from tests.broker_process import BrokerProcess, broker_process
from tests.certificates import TlsFilesOfTests


@pytest.fixture
def files(tmp_path: Path) -> TlsFilesOfTests:
    return TlsFilesOfTests.make(tmp_path / "tls")


@pytest.fixture
def broker(tmp_path: Path, files: TlsFilesOfTests) -> Iterator[BrokerProcess]:
    """A broker that asks its clients for a certificate."""
    data, client_ca = tmp_path / "data", str(files.authority.ca)
    with broker_process(data, **files.settings, tls_client_ca=client_ca) as started:
        yield started


def test_rows_go_and_come_back_by_tls(spark: SparkSession, broker: BrokerProcess, files: TlsFilesOfTests) -> None:
    client = files.authority.issue("spark", file="client")
    options = {"tls_ca": str(files.authority.ca), "tls_cert": str(client.cert), "tls_key": str(client.key)}
    rows = spark.createDataFrame([("a.b", b"%d" % number) for number in range(500)], "subject string, body binary")
    rows.write.format("qmq").mode("append").options(**options).save(broker.url)
    found = spark.read.format("qmq").options(**options).load(broker.url).select("body").collect()
    assert sorted(int(bytes(row.body)) for row in found) == list(range(500))
    untrusting = spark.read.format("qmq").option("tls_ca", options["tls_ca"]).load(broker.url)
    with pytest.raises(PySparkException, match="asks for a client certificate: give tls_cert and tls_key"):
        untrusting.collect()


def test_files_for_a_plain_place_are_refused() -> None:
    with pytest.raises(InvalidOption, match="option tls_ca is given, but qmq://a does not begin with qmqs://"):
        read_options({"path": "qmq://a", "tls_ca": "ca.pem"})
    assert read_options({"path": "qmqs://a", "tls_ca": "ca.pem"}).tls == ("ca.pem", None, None)
