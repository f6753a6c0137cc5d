"""The tables of two queues that lived in MySQL, with rows, for tests and for the pages in docs/."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Final

import sqlalchemy as sa

#: A queue by priority: a table each, offsets by group and priority, and ranges that a group is to get again.
BY_PRIORITY: Final = (
    *(
        f"""CREATE TABLE msg_{name}_t (
            id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, body MEDIUMBLOB NOT NULL, source_ip VARCHAR(64),
            token VARCHAR(64), ref_key VARCHAR(128), timestamp DATETIME(3) NOT NULL, properties TEXT
        )"""
        for name in ("low", "middle", "high")
    ),
    """CREATE TABLE offset_t (
        group_id VARCHAR(64) NOT NULL, `offset` BIGINT NOT NULL, priority VARCHAR(8) NOT NULL,
        PRIMARY KEY (group_id, priority)
    )""",
    *(
        f"""CREATE TABLE resend_{name} (
            `group` VARCHAR(64) NOT NULL, start BIGINT NOT NULL, end BIGINT NOT NULL
        )"""
        for name in ("low", "middle", "high")
    ),
)

#: A queue whose workers claim rows: n is new, run is claimed by conn_id, y is done.
CLAIMED: Final = (
    """CREATE TABLE queue_t (
        id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, biz VARCHAR(64) NOT NULL, conn_id BIGINT,
        status ENUM('n', 'run', 'y') NOT NULL DEFAULT 'n', data_string TEXT NOT NULL, times INT NOT NULL DEFAULT 0,
        update_times DATETIME NOT NULL
    )""",
)


def execute(url: str, *statements: str) -> None:
    """Run statements in one transaction."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    engine.dispose()


def fill_by_priority(url: str, rows: int) -> None:
    """Make the tables by priority, each with so many rows."""
    values = [
        f"('{name}', 'b{number}', '10.0.0.{number % 9}', 'k-{number % 3}', '2026-01-31 12:00:00.{number:03}', "
        f'\'{{"tenant": "t-{number % 2}"}}\')'
        for name in ("low", "middle", "high")
        for number in range(1, rows + 1)
    ]
    inserts = []
    for name in ("low", "middle", "high"):
        own = ", ".join(value.replace(f"('{name}', ", "(", 1) for value in values if value.startswith(f"('{name}'"))
        inserts.append(f"INSERT INTO msg_{name}_t (body, source_ip, ref_key, timestamp, properties) VALUES {own}")
    execute(url, *BY_PRIORITY, *inserts)


def commands_of(page: str) -> list[list[str]]:
    """Return the arguments of each `qmq import` in a page of docs/, as a shell has them."""
    text = (Path(__file__).parents[3] / "docs" / page).read_text("utf-8")
    blocks = [
        block for block in re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL) if "qmq import" in block
    ]
    return [shlex.split(block[block.index("qmq import") :].replace("\\\n", " "))[2:] for block in blocks]
