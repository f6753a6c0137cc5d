"""The shape of the tree: imports run one way and in no circle, a class name means one thing, and
`import qmq` loads little.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

#: The names that users import from ``qmq``.
PUBLIC = "the public surface"

#: What a module may import of QMQ. The longest entry that names the module, or a package it is in, counts.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "qmq": ("qmq.durations", "qmq.errors", "qmq.format.ids", "qmq.logs", "qmq.names", "qmq.net"),
    "qmq.errors": (),
    "qmq.version": (),
    "qmq.names": ("qmq.errors",),
    "qmq.durations": ("qmq.errors",),
    "qmq.intervals": (),
    "qmq.logs": (),
    "qmq.ownership": (),
    "qmq.ping_socket": ("qmq.names", "qmq.ownership"),
    "qmq.format": ("qmq.errors", "qmq.format", "qmq.names"),
    "qmq.storage": ("qmq.errors", "qmq.format", "qmq.intervals", "qmq.names", "qmq.ownership", "qmq.storage"),
    "qmq.broker": (
        "qmq.broker",
        "qmq.errors",
        "qmq.format",
        "qmq.intervals",
        "qmq.names",
        "qmq.net.protocol.matches",
        "qmq.net.protocol.selection",
        "qmq.net.protocol.types",
        "qmq.storage.store",
    ),
    "qmq.net.protocol": ("qmq.errors", "qmq.format", "qmq.names", "qmq.net.protocol"),
    # Types that brokers and clients exchange: of QMQ they know the format alone, so both may import them.
    "qmq.net.protocol.types": ("qmq.format",),
    "qmq.net.protocol.matches": ("qmq.errors", "qmq.format", "qmq.net.protocol.selection"),
    "qmq.net.protocol.selection": ("qmq.errors", "qmq.format", "qmq.names"),
    "qmq.net.client": (
        "qmq.durations",
        "qmq.errors",
        "qmq.format",
        "qmq.intervals",
        "qmq.names",
        "qmq.net.client",
        "qmq.net.protocol",
        "qmq.ownership",
        "qmq.net.transfer",
        "qmq.ping_socket",
        "qmq.version",
    ),
    "qmq.net.transfer": (),
    "qmq.net.server": (
        "qmq.broker.ports.access",
        "qmq.broker.ports.commands",
        "qmq.broker.ports.effects",
        "qmq.broker.ports.metrics",
        "qmq.broker.ports.rights",
        "qmq.errors",
        "qmq.format",
        "qmq.names",
        "qmq.net.protocol",
        "qmq.net.server",
        "qmq.net.transfer",
    ),
    "qmq.tokens": ("qmq.errors", "qmq.names", "qmq.ownership"),
    "qmq.settings": ("qmq.durations", "qmq.errors", "qmq.names"),
    "qmq.daemon": (
        "qmq.broker",
        "qmq.daemon",
        "qmq.durations",
        "qmq.errors",
        "qmq.format",
        "qmq.names",
        "qmq.net",
        "qmq.ping_socket",
        "qmq.settings",
        "qmq.storage",
        "qmq.tokens",
        "qmq.version",
    ),
    # Readers of segments need to know whose a segment is and where its batches begin. They open no store, change none,
    # and know nothing of groups.
    "qmq.archive": (
        "qmq.errors",
        "qmq.format",
        "qmq.archive",
        "qmq.net.client.address",
        "qmq.net.client.log_reader",
        "qmq.net.protocol.matches",
        "qmq.net.protocol.selection",
        "qmq.storage.meta.checkpoint",
        "qmq.storage.consumer_log.header",
        "qmq.storage.disk.checksummed_json",
        "qmq.storage.disk.disk",
        "qmq.storage.key_index",
        "qmq.storage.meta.identity",
        "qmq.storage.message_log.sparse_index",
        "qmq.storage.disk.dir_lock",
        "qmq.storage.message_log.archive_receipt",
        "qmq.storage.message_log.reader",
        "qmq.storage.message_log.segment",
    ),
    "qmq.restore": (
        "qmq.errors",
        "qmq.format",
        "qmq.archive",
        "qmq.intervals",
        "qmq.names",
        "qmq.net.client.address",
        "qmq.net.client.backoff",
        "qmq.net.client.restore",
        "qmq.net.protocol.types",
        "qmq.restore",
    ),
    "qmq_spark": (
        PUBLIC,
        "qmq.errors",
        "qmq.format",
        "qmq.archive",
        "qmq.restore.parquet_apart",
        "qmq.intervals",
        "qmq_spark",
    ),
    "qmq.testing": (
        "qmq.broker.ports.commands",
        "qmq.daemon.main",
        "qmq.durations",
        "qmq.errors",
        "qmq.format",
        "qmq.names",
        "qmq.net.client",
        "qmq.net.protocol.types",
        "qmq.settings",
        "qmq.testing",
    ),
    # A client in a process of its own: it knows of a broker what every client does.
    "qmq.console": (PUBLIC, "qmq.console", "qmq.durations", "qmq.errors", "qmq.names", "qmq.net.client", "qmq.version"),
    # A user's program beside a database: what it knows of a broker is the public client.
    "qmq.sql": (PUBLIC, "qmq.sql", "qmq.durations", "qmq.errors", "qmq.names"),
    # Queries read the files of a directory or an archive, and the logs of brokers, as Spark does.
    "qmq.sql.query": (
        PUBLIC,
        "qmq.errors",
        "qmq.sql.query",
        "qmq_spark.parquet.read",
        "qmq_spark.plan",
        "qmq_spark.read",
        "qmq_spark.schema",
    ),
    "qmq.bench": (PUBLIC, "qmq.bench", "qmq.errors", "qmq.format", "qmq.net"),
    "qmq.cli": (
        PUBLIC,
        "qmq.bench",
        "qmq.cli",
        "qmq.console",
        "qmq.durations",
        "qmq.errors",
        "qmq.format",
        "qmq.archive",
        "qmq.logs",
        "qmq.names",
        "qmq.net",
        "qmq.restore",
        "qmq.settings",
        "qmq.sql",
        "qmq.tokens",
        "qmq.storage.disk.disk",
        "qmq.storage.verify.repair",
        "qmq.storage.verify.renew_id",
        "qmq.storage.verify.skip_ahead",
        "qmq.storage.verify.verify",
        "qmq.daemon.main",
        "qmq.daemon.verify",
        "qmq_spark.parquet.archive",  # which needs pyarrow, and no Spark
        "qmq.version",
    ),
}

SCREEN = ("click", "rich")
WEB = ("jinja2", "prometheus_client", "starlette", "uvicorn")
DATABASES = ("django", "duckdb", "sqlalchemy")
OUTSIDE = ("asyncio", "os", "pydantic", "random", "socket", "threading", "time", "uvloop")

#: What a module must not import of the world: rules have no clock and no sockets, formats do no I/O.
MAY_NOT_IMPORT: dict[str, tuple[str, ...]] = {
    "qmq": (*SCREEN, *DATABASES, "pydantic", "pyspark"),
    "qmq.format": (*SCREEN, *OUTSIDE, "mmap"),
    "qmq.storage": (*SCREEN, "asyncio", "pydantic", "random", "uvloop"),
    "qmq.broker": (*SCREEN, *OUTSIDE),
    "qmq.restore": (*SCREEN, "pydantic", "pyspark"),
    "qmq.archive": (*SCREEN, "asyncio", "pyarrow", "pydantic", "pyspark", "uvloop"),
    "qmq_spark": (*SCREEN, "asyncio", "pydantic", "socket", "uvloop"),
    "qmq.settings": (*SCREEN, "asyncio", "socket"),
    "qmq.tokens": (*SCREEN, "asyncio", "socket"),
    "qmq.cli": (*DATABASES, "pyspark"),
    "qmq.sql": (*SCREEN, "pyspark"),
    # `qmq top` has them too, and works without the extra.
    "qmq.console.snapshot": (*SCREEN, *WEB, "asyncio", "time"),
    "qmq.console.history": (*SCREEN, *WEB, "asyncio", "time"),
    "qmq.console.watch": (*SCREEN, *WEB),
    "qmq.console": SCREEN,
}


#: Where packages lie: their modules' names begin there.
TOPS = (ROOT, ROOT / "spark")


def module_name(path: Path) -> str:
    parts = path.relative_to(TOPS[path.is_relative_to(TOPS[1])]).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(source: str) -> Iterator[str]:
    """Every dotted name that *source* imports, at the top or inside: `from a import b` is `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}: name the module in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def source_files() -> list[Path]:
    """Return the modules of both packages."""
    return sorted(path for top in ("qmq", "spark") for path in (ROOT / top).rglob("*.py"))


def circles(imports: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Return the groups of modules each of which imports every other one of its group, directly or through others."""
    reached: dict[str, set[str]] = {}
    for module in imports:
        found, new = set[str](), set(imports[module])
        while new:
            found |= new
            new = {name for one in new for name in imports[one]} - found
        reached[module] = found
    found_circles = {
        tuple(sorted(one for one in found if module in reached[one]))
        for module, found in reached.items()
        if module in found
    }
    return sorted(found_circles)


def class_names(source: str) -> Iterator[str]:
    """Yield the name of each class that *source* defines."""
    return (node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))


def is_public(name: str) -> bool:
    """Whether *name* is ``qmq`` or something that it exports, not a module below it."""
    top, _, rest = name.partition(".")
    path = ROOT / "qmq" / rest.partition(".")[0]
    return top == "qmq" and (not rest or not (path.is_dir() or path.with_suffix(".py").exists()))


def may_import(name: str, allowed: tuple[str, ...]) -> bool:
    return not lies_in(name, ("qmq", "qmq_spark")) or lies_in(name, allowed) or (PUBLIC in allowed and is_public(name))


def lies_in(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def rule_for(module: str, rules: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    known = [name for name in rules if lies_in(module, (name,))]
    return rules[max(known, key=len)]


def violations(module: str, source: str) -> list[str]:
    allowed, refused = rule_for(module, MAY_IMPORT), rule_for(module, MAY_NOT_IMPORT)
    return [
        f"{module} imports {name}"
        for name in imported_names(source)
        if not may_import(name, allowed) or lies_in(name, refused)
    ]


def test_imports_run_one_way() -> None:
    files = source_files()
    assert len(files) > 5
    assert [line for path in files for line in violations(module_name(path), path.read_text("utf-8"))] == []


def test_every_module_stands_in_the_table() -> None:
    """A new top-level module or package takes its place in the direction of imports knowingly."""
    tops = {module_name(path).split(".")[1] for path in (ROOT / "qmq").rglob("*.py") if path.parent != ROOT / "qmq"}
    tops |= {path.stem for path in (ROOT / "qmq").glob("*.py") if path.stem != "__init__"}
    assert sorted(tops - {name.split(".")[1] for name in MAY_IMPORT if "." in name}) == []


def test_no_modules_import_each_other() -> None:
    """Imports for type checkers count: two modules that name each other's types are one thing in two files."""
    sources = {module_name(path): path.read_text("utf-8") for path in source_files() if path.stem != "__init__"}
    imports = {
        module: {
            known for name in imported_names(source) for known in (name, name.rpartition(".")[0]) if known in sources
        }
        - {module}
        for module, source in sources.items()
    }
    assert circles(imports) == []


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "e"}, "e": {"f"}, "f": {"d"}, "g": set()}) == [
        ("b", "c"),
        ("d", "e", "f"),
    ]


def test_a_class_name_means_one_thing() -> None:
    of_django = {"Command", "Meta"}  # it looks for these names
    names = Counter(
        name
        for path in source_files()
        for name in class_names(path.read_text("utf-8"))
        if not (name in of_django and path.is_relative_to(ROOT / "qmq" / "sql" / "django"))
    )
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(
    ("module", "source", "count"),
    [
        ("qmq.net.protocol.frames", "from qmq.storage import store", 1),
        ("qmq.storage.message_log.segment", "import qmq.net.protocol.frames", 1),
        ("qmq.broker.groups.group", "from qmq.storage.store import Store", 0),
        ("qmq.broker.groups.group", "from qmq.storage.message_log.segment import Segment", 1),
        ("qmq.broker.groups.group", "def f():\n    from time import time", 1),
        ("qmq.broker.groups.group", "from qmq.net.protocol.types import Disposition", 0),
        ("qmq.broker.groups.group", "from qmq.net.protocol.frames import FrameKind", 1),
        ("qmq.net.protocol.types", "from qmq.net.protocol.frames import FrameKind", 1),
        ("qmq.net.client.client", "from qmq.broker.ports.commands import Pull", 1),
        ("qmq.net.server", "from qmq.broker.ports.commands import Pull", 0),
        ("qmq.net.server", "from qmq.broker.groups.group import Group", 1),
        ("qmq.errors", "import qmq.names", 1),
        ("qmq.daemon.main", "from qmq.cli.main import cli", 1),
        ("qmq.format.batch", "import os.path\nimport struct", 1),
        ("qmq.cli.messages.produce", "import qmq\nfrom qmq import connect", 0),
        ("qmq.net.client.client", "from qmq import connect", 1),
        ("qmq_spark.read", "from qmq.archive.files import Files", 0),
        ("qmq_spark.read", "from qmq.storage.store import Store", 1),
        ("qmq.archive.segments", "from qmq.storage.store import Store", 1),
        ("qmq.storage.message_log.segment", "import qmq_spark", 1),
        ("qmq.namesake", "import qmq.net\nimport qmq.storage", 1),
    ],
)
def test_the_check_finds_wrong_imports(module: str, source: str, count: int) -> None:
    assert len(violations(module, source)) == count


def test_examples_use_the_public_surface_only() -> None:
    for path in (ROOT / "examples").glob("*.py"):
        names = [name for name in imported_names(path.read_text("utf-8")) if lies_in(name, ("qmq",))]
        assert [name for name in names if not is_public(name)] == [], path.name


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_qmq_takes_little() -> None:
    loaded = modules_after("import qmq")
    assert "qmq" in loaded
    heavy = {"click", "pydantic", "pyspark", "qmq.broker", "qmq.cli", "qmq.settings", "qmq.storage", "rich", "uvloop"}
    assert loaded & heavy == set()


def test_help_loads_no_command() -> None:
    loaded = modules_after("from qmq.cli.main import cli; cli(['--help'], standalone_mode=False)")
    assert "qmq.cli.main" in loaded
    heavy = {
        "asyncio",
        "numpy",
        "pydantic",
        "qmq.cli.operate.serve",
        "qmq.net",
        "qmq.settings",
        "qmq.storage",
        "rich",
        "uvloop",
    }
    assert loaded & heavy == set()
