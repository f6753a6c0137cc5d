"""Read the invoices of the Online Retail data as messages, one an invoice. See README.md beside this file for the
source.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import unicodedata
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

DATA = Path(__file__).parent / "online-retail-2010-12.csv.gz"

_NOT_IN_A_SEGMENT = re.compile(r"[^a-z0-9]+")


class InvoiceMessage(NamedTuple):
    """An invoice as a message to send."""

    subject: str
    key: str
    body: bytes

    @property
    def is_cancellation(self) -> bool:
        return self.subject.endswith(".cancel")


def country_segment(country: str) -> str:
    """Return *country* as a segment of a subject: ``"Channel Islands"`` is ``"channel-islands"``, ``""``
    ``"unspecified"``.
    """
    ascii_only = unicodedata.normalize("NFKD", country).encode("ascii", "ignore").decode()
    return _NOT_IN_A_SEGMENT.sub("-", ascii_only.lower()).strip("-") or "unspecified"


def read_invoices(path: Path = DATA) -> Iterator[InvoiceMessage]:
    """Yield the invoices of a file in its order; the lines of an invoice follow each other."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for number, rows in groupby(csv.DictReader(file), key=lambda row: row["InvoiceNo"]):
            yield _message(number, list(rows))


def _message(number: str, rows: list[dict[str, str]]) -> InvoiceMessage:
    first = rows[0]
    invoice: dict[str, Any] = {
        "invoice": number,
        "customer": int(float(first["CustomerID"])) if first["CustomerID"] else None,
        "country": first["Country"],
        "time": first["InvoiceDate"].replace(" ", "T"),
        "lines": [
            {
                "stock_code": row["StockCode"],
                "description": row["Description"],
                "quantity": int(row["Quantity"]),
                "unit_price": float(row["UnitPrice"]),
            }
            for row in rows
        ],
    }
    kind = "cancel" if number.startswith("C") else "order"
    subject = f"retail.{country_segment(first['Country'])}.{kind}"
    return InvoiceMessage(subject, number, json.dumps(invoice, ensure_ascii=False).encode())
