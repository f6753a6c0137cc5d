"""Install brokers: Debian packages, Maven artifacts, Go modules. Nothing is installed twice."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from bench.peers.peer import Absent

_TIMEOUT_S: Final = 1_200
_POM: Final = """<project xmlns="http://maven.apache.org/POM/4.0.0">
<modelVersion>4.0.0</modelVersion><groupId>bench</groupId><artifactId>{name}</artifactId><version>1</version>
<dependencies>
{dependencies}
</dependencies>
</project>
"""


def say(command: Sequence[str | Path], *, cwd: Path | None = None, more: Mapping[str, str] | None = None) -> str:
    """Run a command, and return its output. Raises Absent with its last words if it fails or does not exist."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=cwd,
            env={**os.environ, **(more or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise Absent(f"there is no {command[0]} on this machine") from None
    except subprocess.TimeoutExpired:
        raise Absent(f"{_shown(command)} took more than {_TIMEOUT_S} s") from None
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split())[-300:]
        raise Absent(f"{_shown(command)} ended with {done.returncode}: {words}")
    return done.stdout + done.stderr


def _shown(command: Sequence[str | Path]) -> str:
    return f"`{' '.join(map(str, command))[:80]}`"


def debian(package: str, program: str) -> Path:
    """Return the path of *program* of a Debian package, which is installed if necessary. Raises Absent."""
    found = shutil.which(program)
    if found is None:
        if os.geteuid():
            raise Absent(f"there is no {program}; `sudo apt-get install {package}` would bring it")
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        say(["apt-get", "update", "-q"], more=quiet)
        say(["apt-get", "install", "-q", "-y", "--no-install-recommends", package], more=quiet)
        found = shutil.which(program)
    if found is None:
        raise Absent(f"Debian's {package} has no {program}")
    return Path(found)


def debian_size(*packages: str) -> int:
    """Return the bytes that installed Debian packages take."""
    told = say(["dpkg-query", "--show", "--showformat", "${Installed-Size}\n", *packages])
    return sum(int(line) for line in told.split()) * 1024


def debian_version(package: str) -> str:
    """Return the version of an installed Debian package, without Debian's own part."""
    told = say(["dpkg-query", "--show", "--showformat", "${Version}", package])
    return told.partition(":")[2].partition("-")[0] if ":" in told else told.partition("-")[0]


def maven(home: Path, name: str, artifacts: Sequence[str]) -> Path:
    """Return a directory with all jars of *artifacts* ("group:artifact:version") and of what they need. Raises
    Absent.
    """
    directory = home / name
    lib, mark = directory / "lib", directory / "artifacts"
    wanted = "\n".join(artifacts)
    if mark.exists() and mark.read_text("utf-8") == wanted:
        return lib
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / "pom.xml").write_text(_POM.format(name=name, dependencies=_dependencies(artifacts)), "utf-8")
    say(["mvn", "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={lib}"], cwd=directory)
    mark.write_text(wanted, "utf-8")
    return lib


def _dependencies(artifacts: Sequence[str]) -> str:
    parts = (artifact.split(":") for artifact in artifacts)
    return "\n".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{name}</artifactId><version>{version}</version></dependency>"
        for group, name, version in parts
    )


def java() -> str:
    """Return the Java to run brokers with. Raises Absent."""
    found = shutil.which("java")
    if found is None:
        raise Absent("there is no java on this machine; Debian's openjdk-17-jre-headless would bring it")
    return found


def go(home: Path, module: str, program: str) -> Path:
    """Return a program of a Go module ("path@version"), built once. Raises Absent."""
    path = home / "go" / program
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        say(["go", "install", module], more={"GOBIN": str(path.parent), "GOFLAGS": "-mod=mod"})
    return path


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files below a directory."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
