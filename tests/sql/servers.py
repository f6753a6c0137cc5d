"""Real database servers for tests: Debian's PostgreSQL and MariaDB, each in a temporary directory, on a Unix socket.

A server has no password, ends with the process that started it, and can be killed and started again. Nothing is synced
to disk unless asked: what a server has written survives its kill, not a loss of power. `make env-sql` brings the
programs.
"""

from __future__ import annotations

import gc
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple, Self

#: As long as a machine with other work may need.
TIMEOUT_S: Final = 60.0
#: So many times a server is started that ends before it takes connections.
_STARTS: Final = 5
#: Both servers refuse to run as root.
_USER: Final = "nobody"
_MARIADB_SCRIPTS: Final = Path("/usr/share/mysql")


class Database(NamedTuple):
    """A database of its own, by the URLs that SQLAlchemy takes."""

    name: str
    url: str
    async_url: str


class Server(ABC):
    """A server with databases in it. Use it in a ``with`` block."""

    def __init__(self, *, synced: bool = False) -> None:
        """With *synced* each commit is on disk, as where people use it."""
        self._synced = synced
        self._numbers = count(1)
        self._process: subprocess.Popen[bytes] | None = None
        self.directory = Path(tempfile.mkdtemp(prefix="qmq-sql-"))
        if os.getuid() == 0:
            os.chown(self.directory, pwd.getpwnam(_USER).pw_uid, -1)

    def __enter__(self) -> Self:
        try:
            self._initialize()
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start it on what it had, and wait until it takes connections."""
        process = self._spawn()
        ends, starts = time.monotonic() + TIMEOUT_S, 1
        while not self._is_ready():
            ended = process.poll()
            if ended is not None and starts < _STARTS:  # processes that were killed may have its memory and ports still
                starts += 1
                time.sleep(0.2)
                process = self._spawn()
            elif ended is not None or time.monotonic() > ends:
                raise RuntimeError(f"the server did not start (exit code {ended}): {self.log()[-3000:]}")
            time.sleep(0.02)

    def _spawn(self) -> subprocess.Popen[bytes]:
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._as_user("--pdeathsig=KILL", *self._command()), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                cwd=self.directory, start_new_session=True,
            )  # fmt: skip
        return self._process

    def kill(self) -> None:
        """kill -9 of all its processes, and wait until they are gone."""
        assert self._process is not None
        with suppress(ProcessLookupError):  # it has ended, and why is in its log
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(TIMEOUT_S)
        self._process = None
        (self.directory / "data" / "postmaster.pid").unlink(missing_ok=True)  # a start of PostgreSQL would wait for it

    def close(self) -> None:
        """End it, and delete its files."""
        if self._process is not None:
            self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def log(self) -> str:
        """What it has written, over all its starts."""
        return (self.directory / "log").read_text("utf-8", "replace")

    def database(self) -> Database:
        """Make an empty database of its own."""
        name = f"test_{next(self._numbers)}"
        self._execute(f"CREATE DATABASE {name}")
        return self.database_named(name)

    @abstractmethod
    def database_named(self, name: str) -> Database:
        """Return the URLs of a database."""

    @abstractmethod
    def _initialize(self) -> None: ...

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    def _is_ready(self) -> bool: ...

    @abstractmethod
    def _execute(self, statement: str) -> None: ...

    def _as_user(self, *command: str) -> list[str]:
        become = ["--reuid", _USER, "--regid", "nogroup", "--clear-groups"] if os.getuid() == 0 else []
        return ["setpriv", *become, *command]

    def _run(self, *command: str, stdin: str = "") -> None:
        done = subprocess.run(self._as_user(*command), input=stdin, cwd=self.directory, capture_output=True, text=True,
                              timeout=TIMEOUT_S)  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed: {(done.stdout + done.stderr)[-3000:]}")


class PostgreSQL(Server):
    """A server of PostgreSQL."""

    def _initialize(self) -> None:
        self._run(_postgresql_program("initdb"), "-D", "data", "-A", "trust", "-U", "qmq", "-N", "--no-instructions",
                  "--locale=C.UTF-8", "-E", "UTF8")  # fmt: skip

    def _command(self) -> list[str]:
        settings = {
            "unix_socket_directories": str(self.directory),
            "listen_addresses": "",
            "shared_buffers": "32MB",
            "max_connections": "200",
            "jit": "off",
            "dynamic_shared_memory_type": "mmap",  # elsewhere it would outlive a killed server
        }
        if not self._synced:
            settings |= {"fsync": "off", "full_page_writes": "off"}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [_postgresql_program("postgres"), "-D", "data", *options]

    def _is_ready(self) -> bool:
        import psycopg

        try:
            psycopg.connect(f"host={self.directory} user=qmq dbname=postgres").close()
        except psycopg.OperationalError:
            return False
        return True

    def _execute(self, statement: str) -> None:
        import psycopg

        with psycopg.connect(f"host={self.directory} user=qmq dbname=postgres", autocommit=True) as connection:
            connection.execute(statement.encode())

    def database_named(self, name: str) -> Database:
        """Return the URLs of a database; psycopg serves both kinds."""
        url = f"postgresql+psycopg://qmq@/{name}?host={self.directory}"
        return Database(name, url, url)


class MariaDB(Server):
    """A server of MariaDB."""

    def _initialize(self) -> None:
        self._run("mkdir", "-p", "data/mysql")
        tables = (_MARIADB_SCRIPTS / "mysql_system_tables.sql").read_text("utf-8")
        self._run(*self._options(), "--bootstrap", stdin=f"USE mysql;\n{tables}")

    def _options(self) -> list[str]:
        synced = (
            ["--innodb-flush-log-at-trx-commit=1"]
            if self._synced
            else ["--innodb-flush-log-at-trx-commit=2", "--innodb-flush-method=nosync", "--innodb-doublewrite=0"]
        )
        return [
            _program("mariadbd"), "--no-defaults", f"--datadir={self.directory}/data", f"--tmpdir={self.directory}",
            "--innodb-log-file-size=32M", "--innodb-buffer-pool-size=64M", "--innodb-use-native-aio=0",
            "--key-buffer-size=1M", "--aria-pagecache-buffer-size=1M", "--skip-log-bin", "--max-connections=200",
            "--character-set-server=utf8mb4", *synced,
        ]  # fmt: skip

    def _command(self) -> list[str]:
        place = ["--skip-networking", f"--socket={self.directory}/socket", f"--pid-file={self.directory}/pid"]
        return [*self._options(), "--skip-grant-tables", *place]

    def _is_ready(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:  # PyMySQL leaves one open that does not connect
            return probe.connect_ex(f"{self.directory}/socket") == 0

    def _execute(self, statement: str) -> None:
        import pymysql

        with pymysql.connect(unix_socket=f"{self.directory}/socket", user="root") as connection:
            connection.cursor().execute(statement)

    def database_named(self, name: str) -> Database:
        """Return the URLs of a database, by PyMySQL and aiomysql."""
        where = f"root@/{name}?unix_socket={self.directory}/socket"
        return Database(name, f"mysql+pymysql://{where}", f"mysql+aiomysql://{where}")


@contextmanager
def leaking_sockets() -> Iterator[None]:
    """Within it nobody minds that PyMySQL leaves a socket open that does not connect."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


def sqlite_database(directory: Path) -> Database:
    """Return the URLs of a file of SQLite in *directory*, by the standard library and by aiosqlite."""
    path = directory / "test.sqlite"
    return Database(path.stem, f"sqlite:///{path}", f"sqlite+aiosqlite:///{path}")


def _postgresql_program(name: str) -> str:
    """Return the path of one of PostgreSQL's programs; Debian keeps them off PATH, by version."""
    versions = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[-3]))
    return str(versions[-1]) if versions else _program(name)


def _program(name: str) -> str:
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    if path is None:
        raise RuntimeError(f"{name} is missing: run `make env-sql`")
    return path
