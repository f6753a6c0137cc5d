"""pyproject.toml, the locks and the environment say the same; the wheel has what users need, and works by itself."""

from __future__ import annotations

import ast
import importlib.metadata
import itertools
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.broker_process import broker_process
from tests.test_readme import PROGRAM, run

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PROJECT, GROUPS = PYPROJECT["project"], PYPROJECT["dependency-groups"]
LOCKS = (
    "requirements.lock",
    "requirements-spark.lock",
    "requirements-ops.lock",
    "requirements-console.lock",
    "requirements-sql.lock",
)
LOCK = "".join((ROOT / name).read_text("utf-8") for name in LOCKS)
DOCS_LOCK = (ROOT / "requirements-docs.lock").read_text("utf-8")


def pins_of(lock: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", lock, re.MULTILINE))


PINS = pins_of(LOCK)
#: Packages of QMQ's dependencies that only its commands and its broker need.
NOT_FOR_CLIENTS = ("pydantic", "pydantic_core", "annotated_types", "rich", "click", "uvloop")


@pytest.mark.parametrize("lock", [LOCK, DOCS_LOCK], ids=["qmq", "docs"])
def test_every_line_of_the_locks_is_a_pin(lock: str) -> None:
    lines = [line for line in lock.splitlines() if line and not line.startswith("#")]
    assert len(pins_of(lock)) == len(lines) > 20
    assert "://" not in lock


@pytest.mark.parametrize(
    ("lock", "asked"),
    [
        (LOCK, [*PROJECT["dependencies"], *itertools.chain(*PROJECT["optional-dependencies"].values())]),
        (LOCK, [text for name, group in GROUPS.items() if name != "docs" for text in group]),
        (DOCS_LOCK, GROUPS["docs"]),
    ],
    ids=["project", "groups", "docs"],
)
def test_what_is_asked_for_is_pinned_within_its_bounds(lock: str, asked: list[str]) -> None:
    pinned = {canonicalize_name(name): version for name, version in pins_of(lock).items()}
    for requirement in map(Requirement, asked):
        if requirement.name == PROJECT["name"] or str(requirement.specifier).startswith("=="):
            continue  # itself, and what is pinned where it is asked for
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement


def test_what_runs_here_is_what_is_pinned() -> None:
    assert {name: importlib.metadata.version(name) for name in PINS} == PINS


def test_what_the_pinned_packages_need_is_pinned_too() -> None:
    pinned = {canonicalize_name(name) for name in PINS}
    needed = {
        canonicalize_name(requirement.name)
        for name in PINS
        for requirement in map(Requirement, importlib.metadata.requires(name) or [])
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }
    assert sorted(needed - pinned) == []


def test_the_command_is_installed() -> None:
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="qmq")
    assert command.value == PROJECT["scripts"]["qmq"]
    assert (ROOT / "qmq" / "py.typed").exists()


# ---------------------------------------------------------------------------------------------------------------------
# A client alone


def test_a_client_needs_nothing_that_only_commands_need(tmp_path: Path) -> None:
    """Every public name can be imported, and a client sends and receives, without these packages."""
    program = f"""
import asyncio, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {NOT_FOR_CLIENTS}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import qmq
for name in qmq.__all__:
    getattr(qmq, name)

async def main(url):
    async with qmq.connect(url) as client:
        await client.send("shop.order", b"a lamp")
        async with client.subscribe("shop.", group="billing") as consumer:
            for message in await consumer.pull(max_count=1, timeout=10):
                async with message:
                    print(message.body.decode())

asyncio.run(main(sys.argv[1]))
"""
    with broker_process(tmp_path / "data") as broker:
        assert run([sys.executable, "-c", program, broker.url], broker.url) == "a lamp\n"


# ---------------------------------------------------------------------------------------------------------------------
# The wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    made = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(made)]
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, check=True)
    (path,) = made.iterdir()
    return path


def test_the_wheel_has_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        names = {name for name in files.namelist() if ".dist-info/" not in name}
        metadata = Parser().parsestr(next(files.read(n).decode() for n in files.namelist() if n.endswith("/METADATA")))
    tracked = subprocess.run(["git", "ls-files", "qmq", "spark/qmq_spark"], cwd=ROOT, capture_output=True, check=True)
    assert names == {name.removeprefix("spark/") for name in tracked.stdout.decode().split()}
    assert {"qmq/py.typed", "qmq_spark/__init__.py"} <= names
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    assert metadata["Requires-Python"] == PROJECT["requires-python"]


def test_extras_are_for_users_and_groups_for_who_works_on_it() -> None:
    assert set(PROJECT["optional-dependencies"]).isdisjoint(GROUPS)
    only_here = {Requirement(text).name for group in GROUPS.values() for text in group} - {
        PROJECT["name"],
        "matplotlib",
    }
    for extra, texts in PROJECT["optional-dependencies"].items():
        assert only_here.isdisjoint({Requirement(text).name for text in texts}), extra


def test_what_the_packages_import_is_asked_for() -> None:
    """A module outside the standard library that is imported at the top of a module is a dependency, or an extra."""
    asked = PROJECT["dependencies"] + [text for extra in PROJECT["optional-dependencies"].values() for text in extra]
    names = {canonicalize_name(Requirement(text).name) for text in asked}
    provided = importlib.metadata.packages_distributions()
    missing = set()
    for path in (*ROOT.joinpath("qmq").rglob("*.py"), *ROOT.joinpath("spark", "qmq_spark").rglob("*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.Import):
                tops = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                tops = {node.module.partition(".")[0]}
            else:
                continue
            for top in tops - set(sys.stdlib_module_names) - {"qmq", "qmq_spark"}:
                if names.isdisjoint(canonicalize_name(name) for name in provided.get(top, [top])):
                    missing.add((str(path.relative_to(ROOT)), top))
    missing.discard(("qmq/testing/pytest_plugin.py", "pytest"))  # pytest alone imports it
    # Both come with pydantic, which makes their types part of its own interface.
    assert {top for _, top in missing} <= {"annotated_types", "pydantic_core"}, missing


@pytest.fixture
def fresh(wheel: Path, tmp_path: Path) -> Path:
    """The programs of a new environment with the wheel and the packages of this environment, without the checkout."""
    venv.create(tmp_path / "fresh", with_pip=False)
    bin_ = tmp_path / "fresh" / "bin"
    install = [sys.executable, "-m", "pip", "--python", bin_ / "python", "install", "--quiet", "--no-deps", wheel]
    subprocess.run(install, capture_output=True, timeout=120, check=True)
    (site,) = (tmp_path / "fresh").glob("lib/python*/site-packages")
    packages = Path(importlib.metadata.distribution("numpy").locate_file("")).resolve()
    (site / "packages.pth").write_text(f"{packages}\n")  # its own .pth files, as that of the checkout, do not count
    return bin_


def test_the_installed_wheel_runs_the_first_program_of_the_readme(fresh: Path, tmp_path: Path) -> None:
    where = [fresh / "python", "-c", "import qmq, qmq_spark; print(qmq.__file__, qmq_spark.__file__)"]
    shown = subprocess.run(where, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True).stdout
    assert all(path.startswith(str(fresh.parent)) for path in shown.split())
    command = [
        fresh / "qmq",
        "serve",
        "--data-dir",
        tmp_path / "data",
        "--listen",
        "127.0.0.1:0",
        "--log-level",
        "error",
    ]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as broker:
        assert broker.stdout is not None
        try:
            server = broker.stdout.readline().split()[2].rstrip(",")
            program = PROGRAM.replace("qmq://127.0.0.1:20881", server)
            shown = run([fresh / "python", "-c", program], server)
        finally:
            broker.terminate()
    assert "hotel.order.created" in shown
    assert broker.returncode == 0
