"""Make messages of the rows of a query."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any, Final

from qmq.errors import InvalidOption, MessageTooLarge, RowRejected, UsageError
from qmq.names import check_subject

#: The properties by which a message says which row it was.
IMPORT: Final = "import"
IMPORT_ID: Final = "import-id"
#: The priorities that a column may say.
_PRIORITIES: Final = {
    "low": "low", "0": "low", "normal": "normal", "middle": "normal", "medium": "normal", "1": "normal",
    "high": "high", "2": "high",
}  # fmt: skip

Row = Mapping[str, Any]
#: A value of the id column.
RowId = int | str


@dataclass(frozen=True)
class RowColumns:
    """The columns of a query that become parts of messages. Give either ``subject`` or ``subject_column``."""

    subject: str | None = None
    subject_column: str | None = None
    id: str = "id"
    body: str = "body"
    keys: tuple[str, ...] = ()
    tags: str | None = None
    order_key: str | None = None
    priority: str | None = None
    time: str | None = None
    properties: tuple[str, ...] = ()
    json_properties: str | None = None

    def check(self, names: list[str]) -> None:
        """Raise InvalidOption unless a query with these columns has all that are named."""
        if (self.subject is None) is (self.subject_column is None):
            raise InvalidOption("give either --subject or --subject-column")
        if self.subject is not None:
            check_subject(self.subject)
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise InvalidOption(f"the query has two columns {repeated[0]}; name one of them otherwise, with AS")
        single = {
            "--subject-column": self.subject_column, "--id": self.id, "--body": self.body, "--tags": self.tags,
            "--order-key": self.order_key, "--priority": self.priority, "--time": self.time,
            "--json-properties": self.json_properties,
        }  # fmt: skip
        named = [(option, name) for option, name in single.items() if name is not None]
        named += [("--key", name) for name in self.keys] + [("--properties", name) for name in self.properties]
        for option, name in named:
            if name not in names:
                advice = {
                    "--id": "; name the column that tells rows apart with --id",
                    "--body": "; name the column with the body with --body",
                }.get(option, f", which {option} names")
                raise InvalidOption(f"the query has no column {name}{advice}. It has {', '.join(names)}")

    def id_of(self, row: Row) -> RowId:
        """Return the id of a row. Raises InvalidOption if it has none that can be kept."""
        value = row[self.id]
        if isinstance(value, Decimal) and value == value.to_integral_value():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise InvalidOption(
                f"the id {value!r:.80} in column {self.id} is neither a whole number nor a text; cast it in the query"
            )
        return value

    def message_of(self, row: Row, name: str, id_text: str) -> dict[str, Any]:
        """Return the arguments of ``send_nowait`` for a row of the import *name*. Raises RowRejected."""
        try:
            return self._message_of(row, {IMPORT: name, IMPORT_ID: id_text})
        except (UsageError, MessageTooLarge, TypeError, ValueError) as error:
            raise RowRejected(str(error)) from error

    def _message_of(self, row: Row, properties: dict[str, str]) -> dict[str, Any]:
        subject = self.subject if self.subject_column is None else text_of(row[self.subject_column])
        if subject is None:
            raise ValueError(f"the subject in column {self.subject_column} is NULL")
        made: dict[str, Any] = {"subject": check_subject(subject), "body": body_of(row[self.body])}
        for column in self.properties:
            _add(properties, column, row[column])
        if self.json_properties is not None:
            for key, value in _object(row[self.json_properties], self.json_properties).items():
                _add(properties, key, value)
        if self.time is not None:
            _add(properties, "time", row[self.time])
        made["properties"] = properties
        keys = [key for key in (text_of(row[column]) for column in self.keys) if key]
        if keys:
            made["keys"] = keys
        if self.tags is not None and (tags := text_of(row[self.tags])):
            made["tags"] = [tag.strip() for tag in tags.split(",") if tag.strip()]
        if self.order_key is not None and (order_key := text_of(row[self.order_key])):
            made["order_key"] = order_key
        if self.priority is not None and (priority := priority_of(row[self.priority])) != "normal":
            made["priority"] = priority
        return made


def priority_of(value: Any) -> str:
    """Return the priority that a column says; NULL is the normal one. Raises ValueError."""
    text = text_of(value)
    if text is None:
        return "normal"
    priority = _PRIORITIES.get(text.strip().lower())
    if priority is None:
        raise ValueError(f"the priority {text!r:.80} is none of low, normal (or middle), high, 0, 1 and 2")
    return priority


def body_of(value: Any) -> bytes:
    """Return the body that a column says: bytes as they are, texts in UTF-8, other values as JSON or text."""
    if value is None:
        return b""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    return (text_of(value) or "").encode()


def text_of(value: Any) -> str | None:
    """Return the text of a value; None for NULL. Raises ValueError for bytes that are none."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            raise ValueError(f"{bytes(value)!r:.80} is no text in UTF-8") from None
    if isinstance(value, datetime):
        return value.isoformat() if value.tzinfo is None else value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return str(value)


def _add(properties: dict[str, str], name: str, value: Any) -> None:
    text = text_of(value)
    if text is not None:
        properties[name] = text


def _object(value: Any, column: str) -> Mapping[str, Any]:
    """Return the object in a column. Raises ValueError if it is none."""
    if not isinstance(value, dict):
        text = text_of(value)
        try:
            value = json.loads(text) if text and text.strip() else {}
        except ValueError:
            value = None
    if not isinstance(value, dict):
        raise ValueError(f"column {column} is no object of JSON")
    return value
