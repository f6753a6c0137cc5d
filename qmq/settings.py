"""The settings of ``qmq serve``: their defaults, bounds and descriptions, and how they are read.

A key ends with its unit (``checkpoint_ms``, ``segment_bytes``). Keys that end with ``_bytes`` also take text such as
``"256 MiB"``, those that end with ``_ms`` text such as ``"7d"``. Flags win over ``--set``, ``--set`` over the
environment, the environment over the file, the file over the defaults.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from annotated_types import Ge, Le
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from qmq.durations import milliseconds_of
from qmq.errors import InvalidOption

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

_SIZE: Final = re.compile(r"(\d+) ?(KiB|MiB|GiB|TiB)?", re.ASCII)
_SIZE_UNITS: Final = {None: 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1024 * GIB}
#: Bytes of a frame with one message beside its body: headers, a run, its columns, the subject's name.
_ONE_MESSAGE_EXTRA: Final = 4 * KIB
#: Bytes of a segment file before its first batch.
_SEGMENT_EXTRA: Final = 64


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT`` (an IPv6 host in brackets). Port 0 is allowed. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("an IPv6 host stands in brackets")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ValueError("not HOST:PORT")
    return host, int(port)


def parse_addresses(text: str) -> list[tuple[str, int]]:
    """Return host and port of each ``HOST:PORT`` in *text*, which commas separate. Raises ValueError."""
    return [parse_address(part.strip()) for part in text.split(",")]


def _listen_addresses(value: str) -> str:
    parse_addresses(value)
    return value


def _reachable_address(value: str) -> str:
    if parse_address(value)[1] == 0:
        raise ValueError("port 0 cannot be reached")
    return value


def _whole_number(value: object) -> object:
    if isinstance(value, str) and value.strip().isdigit():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError("not a whole number")


def _milliseconds(value: object) -> object:
    if isinstance(value, str) and not value.strip().isdigit():
        return milliseconds_of("the duration", value)
    return _whole_number(value)


def size_of(value: object) -> object:
    """Return the bytes of a size such as "256 MiB", or a whole number as it is. Raises ValueError."""
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            raise ValueError("not a size")
        return int(match[1]) * _SIZE_UNITS[match[2]]
    return _whole_number(value)


def _path(value: object) -> object:
    if value == "":
        raise ValueError("an empty path")
    return value


def _yes_or_no(value: object) -> object:
    known = {"true": True, "false": False}
    return known.get(value.strip().lower(), value) if isinstance(value, str) else value


def _paths(value: object) -> object:
    if isinstance(value, str):
        return tuple(part for part in value.split(",") if part)
    return value


def show_bytes(count: int) -> str:
    """Return *count* in the largest unit that divides it (``64 KiB``), else in digits. ``Settings`` reads both."""
    for name, unit in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count and count % unit == 0:
            return f"{count // unit} {name}"
    return str(count)


Count = Annotated[int, BeforeValidator(_whole_number)]
Milliseconds = Annotated[int, BeforeValidator(_milliseconds)]
Bytes = Annotated[int, BeforeValidator(size_of)]


class Settings(BaseModel):
    """The settings of one broker. An object never changes: a running broker that reloads its file gets a new one, which
    differs in the keys of ``qmq.daemon.reload.RELOADABLE`` only.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    # files and addresses
    data_dir: Annotated[Path, BeforeValidator(_path)] = Field(
        Path("qmq-data"), description="Directory of all data; created if it does not exist."
    )
    listen: Annotated[str, AfterValidator(_listen_addresses)] = Field(
        "127.0.0.1:20881",
        description="HOST:PORT to serve on, or several; with port 0 a free port is chosen. The host [::] stands for all"
        " addresses, of IPv6 and of IPv4.",
    )
    advertise: Annotated[str, AfterValidator(_reachable_address)] | None = Field(
        None, description="HOST:PORT at which clients reach this broker, if it differs from listen."
    )
    tls_cert: Annotated[Path, BeforeValidator(_path)] | None = Field(
        None, description="PEM file with the broker's certificate and its intermediate ones: clients connect by TLS."
    )
    tls_key: Annotated[Path, BeforeValidator(_path)] | None = Field(
        None, description="PEM file with the key of tls_cert, without a password."
    )
    tls_client_ca: Annotated[Path, BeforeValidator(_path)] | None = Field(
        None, description="PEM file with the CAs of client certificates; if given, every client needs one."
    )
    tokens_file: Annotated[Path, BeforeValidator(_path)] | None = Field(
        None, description="File of the tokens that let clients in; by default tokens.toml in data_dir, if it exists."
    )
    insecure: Annotated[bool, BeforeValidator(_yes_or_no)] = Field(
        False, description="Whether to serve without tokens on addresses other than this machine's own."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level of log lines that are written to stderr."
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="Form of the log lines: text for people, or one JSON object a line."
    )

    # the message log
    partitions: Count = Field(
        1, ge=1, le=256, description="Partitions of the message log, each a directory of its own."
    )
    partition_dirs: Annotated[tuple[Path, ...], BeforeValidator(_paths)] = Field(
        (), description="One directory for each partition, for example on several disks; empty: log-N in data_dir."
    )
    segment_bytes: Bytes = Field(
        256 * MIB,
        ge=64 * KIB,
        le=4 * GIB,
        description="Size at which a segment (a file of the message log) is full and the next one begins.",
    )
    reserve_bytes: Bytes = Field(
        1 * GIB,
        ge=1 * MIB,
        le=1024 * GIB,
        description="Positions are reserved this many bytes ahead, so that none is used twice after power loss.",
    )
    checkpoint_ms: Milliseconds = Field(
        1_000, ge=10, le=3_600_000, description="Longest time between two checkpoints while anything changes."
    )
    checkpoint_bytes: Bytes = Field(
        256 * MIB, ge=64 * KIB, le=64 * GIB, description="Most bytes written between two checkpoints."
    )
    max_unsynced_bytes: Bytes = Field(
        512 * MIB,
        ge=1 * MIB,
        le=64 * GIB,
        description="Most bytes that are not yet on disk; then sends wait for the disk.",
    )
    keep_free_bytes: Bytes = Field(
        64 * MIB,
        ge=0,
        le=1024 * GIB,
        description="Free space that sends leave on each disk for checkpoints and acks; at most 1/16 of the disk.",
    )
    pull_log_keep_ms: Milliseconds = Field(
        86_400_000,
        ge=0,
        le=366 * 86_400_000,
        description="How long the pull log is kept for the events of `qmq trace`; 0: only as long as a start needs it.",
    )
    pull_log_keep_bytes: Bytes = Field(
        1 * GIB, ge=0, le=1024 * GIB, description="Most bytes of the pull log that are kept for `qmq trace`."
    )
    scrub_bytes_per_s: Bytes = Field(
        1 * MIB,
        ge=0,
        le=1 * GIB,
        description="Bytes per second at which full segments are read again to find damage; 0: never.",
    )
    scrub_round_ms: Milliseconds = Field(
        3_600_000,
        ge=10,
        le=30 * 86_400_000,
        description="Shortest time between the starts of two such rounds over all segments.",
    )

    # retention
    retention_ms: Milliseconds = Field(
        7 * 86_400_000,
        ge=0,
        le=100 * 365 * 86_400_000,
        description="Age at which a segment goes once every group has taken its messages; 0: never.",
    )
    retention_max_ms: Milliseconds = Field(
        0,
        ge=0,
        le=100 * 365 * 86_400_000,
        description="Age at which a segment goes even if groups have not taken its messages; 0: never.",
    )
    retention_bytes: Bytes = Field(
        0,
        ge=0,
        le=1024 * 1024 * GIB,
        description="Size of the message log above which its oldest segments are dropped; 0: no limit.",
    )
    retention_needs_archive: Literal["yes", "no"] = Field(
        "no", description="Whether a segment is dropped only after `qmq archive` has verified a copy of it."
    )

    # connections
    max_frame_bytes: Bytes = Field(
        16 * MIB, ge=64 * KIB, le=1 * GIB, description="Largest frame that the broker takes; a batch is one frame."
    )
    max_message_bytes: Bytes = Field(
        4 * MIB, ge=1 * KIB, le=1 * GIB, description="Largest message: its key, tags, properties and body."
    )
    max_connections: Count = Field(10_000, ge=1, le=1_000_000, description="Most connections at the same time.")
    max_waiting_pulls: Count = Field(1_000, ge=1, le=100_000, description="Most waiting pulls of one connection.")
    max_consumers_per_connection: Count = Field(
        1_000, ge=1, le=100_000, description="Most consumers (subscriptions) of one connection; a client has one."
    )
    max_inflight_bytes: Bytes = Field(
        64 * MIB,
        ge=64 * KIB,
        le=16 * GIB,
        description="Most bytes of answers that one connection has not read; then its pulls wait.",
    )
    max_buffered_bytes: Bytes = Field(
        512 * MIB,
        ge=1 * MIB,
        le=256 * GIB,
        description="Most bytes of unfinished frames, unread answers and open requests of all connections together.",
    )
    first_frame_timeout_ms: Milliseconds = Field(
        10_000,
        ge=10,
        le=3_600_000,
        description="Time within which a new connection must send HELLO, and before that finish its TLS handshake.",
    )
    max_handshakes: Count = Field(
        1_000, ge=1, le=100_000, description="Most unfinished TLS handshakes; one more ends the oldest."
    )
    max_pull_count: Count = Field(1_000_000, ge=1, le=10_000_000, description="Most messages that one pull returns.")
    max_pull_bytes: Bytes = Field(
        16 * MIB,
        ge=64 * KIB,
        le=1 * GIB,
        description="Most bytes that one pull returns; a single message may be larger.",
    )

    session_timeout_ms: Milliseconds = Field(
        30_000,
        ge=100,
        le=86_400_000,
        description="A consumer that is silent for this long has expired; others get its messages.",
    )
    reconnect_timeout_ms: Milliseconds = Field(
        5_000,
        ge=0,
        le=86_400_000,
        description="Time that a client has to come back once its system has closed its connections; then its "
        "consumers have expired, before session_timeout_ms.",
    )
    broadcast_ttl_ms: Milliseconds = Field(
        7 * 86_400_000,
        ge=60_000,
        le=10 * 365 * 86_400_000,
        description="Time after which a member of a broadcast that is offline is forgotten.",
    )

    # the whole broker
    max_subjects: Count = Field(
        1_000_000, ge=1, le=16_000_000, description="Most subjects with messages; up to four times as many are known."
    )
    max_groups: Count = Field(10_000, ge=1, le=1_000_000, description="Most groups.")
    max_producers: Count = Field(
        100_000,
        ge=1,
        le=10_000_000,
        description="Most producers that are remembered, so that repeated sends are recognized; beyond it the one that "
        "is idle for longest without a connection is forgotten.",
    )
    producer_window: Count = Field(
        64,
        ge=1,
        le=4_096,
        description="Last batches of a producer that are remembered; it has at most as many in flight.",
    )
    producer_ttl_ms: Milliseconds = Field(
        3_600_000,
        ge=60_000,
        le=30 * 86_400_000,
        description="Time for which a producer is remembered after its last send.",
    )
    unique_for_ms: Milliseconds = Field(
        3_600_000,
        ge=1_000,
        le=30 * 86_400_000,
        description="Time for which a unique text is remembered: what is sent with it again is stored once.",
    )
    max_unique_texts: Count = Field(
        1_000_000,
        ge=1_000,
        le=100_000_000,
        description="Most unique texts that are remembered; beyond it the oldest are forgotten early, and counted.",
    )
    max_unique_bytes: Bytes = Field(
        256 << 20,
        ge=1 << 20,
        le=1 << 40,
        description="Most memory that unique texts take, about 320 bytes each; beyond it the oldest go early.",
    )

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            key, other = ("tls_cert", "tls_key") if self.tls_key is None else ("tls_key", "tls_cert")
            raise _misfit(key, str(getattr(self, key)), f"{other} as well (one file may be both)")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise _misfit("tls_client_ca", str(self.tls_client_ca), "tls_cert and tls_key as well")
        if self.partition_dirs and len(self.partition_dirs) != self.partitions:
            raise _misfit(
                "partition_dirs", self.partition_dirs, f"one directory for each of the {self.partitions} partitions"
            )
        if self.segment_bytes < self.max_frame_bytes + _SEGMENT_EXTRA:
            least = self.max_frame_bytes + _SEGMENT_EXTRA
            raise _misfit(
                "segment_bytes", self.segment_bytes, f"at least {least}, so that a batch of max_frame_bytes fits"
            )
        if self.max_message_bytes > self.max_frame_bytes - _ONE_MESSAGE_EXTRA:
            most = self.max_frame_bytes - _ONE_MESSAGE_EXTRA
            raise _misfit(
                "max_message_bytes", self.max_message_bytes, f"at most {most}, so that it fits max_frame_bytes"
            )
        largest = max(self.max_frame_bytes, self.max_pull_bytes)
        if self.max_buffered_bytes < 2 * largest:
            raise _misfit(
                "max_buffered_bytes",
                self.max_buffered_bytes,
                f"at least {2 * largest}, twice max_frame_bytes and max_pull_bytes",
            )
        if self.reserve_bytes < 4 * self.max_frame_bytes:
            least = 4 * self.max_frame_bytes
            raise _misfit("reserve_bytes", self.reserve_bytes, f"at least {least}, four times max_frame_bytes")
        return self


def _misfit(key: str, value: object, allowed: str) -> PydanticCustomError:
    """Return the error of a value that is allowed by itself, but does not fit another setting."""
    return PydanticCustomError("misfit", "{key}", {"key": key, "value": value, "allowed": allowed})


def load(
    config: Path | None = None,
    assignments: Iterable[str] = (),
    flags: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Return the settings of a TOML file *config*, of ``QMQ_KEY`` in *environment*, of ``key=value`` *assignments*, and
    of *flags* that are not None; each of these wins over those before it.

    Raises InvalidOption, which names the key, its source, the value, and the allowed values.
    """
    given: dict[str, tuple[str, object]] = {}
    if config is not None:
        given.update((key, (str(config), value)) for key, value in _read_toml(config).items())
    for key in Settings.model_fields:
        name = f"QMQ_{key.upper()}"
        if value := (environment or {}).get(name):
            given[key] = (name, value)
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise InvalidOption(f"--set {assignment!r} is not key=value; `qmq config` lists the keys")
        given[key.strip()] = ("--set", value.strip())
    for key, flag in (flags or {}).items():
        if flag is not None:
            given[key] = (f"--{key.replace('_', '-')}", flag)
    for key, (source, _) in given.items():
        if key not in Settings.model_fields:
            raise InvalidOption(f"{key!r} ({source}) is not a setting{_nearest(key)}; `qmq config` lists all settings")
    try:
        return Settings.model_validate({key: value for key, (_, value) in given.items()})
    except ValidationError as error:
        raise InvalidOption(_explain(error, given)) from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InvalidOption(
            f"the settings file {path} cannot be read: {error.strerror}; give the path of a readable file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidOption(
            f"the settings file {path} is not TOML: {error}; write lines such as partitions = 2"
        ) from None


def _nearest(key: str) -> str:
    near = difflib.get_close_matches(key, Settings.model_fields, n=1)
    return f", did you mean {near[0]!r}?" if near else ""


def _explain(error: ValidationError, given: Mapping[str, tuple[str, object]]) -> str:
    first = error.errors()[0]
    context = first.get("ctx", {})
    if first["type"] == "misfit":
        key, allowed = context["key"], context["allowed"]
    else:
        key = str(first["loc"][0])
        allowed = _allowed(key, Settings.model_fields[key])
    source, value = given.get(key, ("the default", context.get("value")))
    return f"{key} = {value if type(value) is int else repr(value)} ({source}) is not allowed; give {allowed}"


def shown_settings(settings: Settings) -> dict[str, int | str | list[str] | None]:
    """Return all settings by key, as numbers and texts that ``load`` reads."""
    return {key: _plain(getattr(settings, key)) for key in Settings.model_fields}


def differing_settings(settings: Settings) -> list[str]:
    """Return the keys of the settings that differ from their defaults."""
    return [key for key, field in Settings.model_fields.items() if getattr(settings, key) != field.default]


def settings_text(values: Mapping[str, Any]) -> str:
    """Return settings as text: ``listen = 0.0.0.0:20881, segment_bytes = 64 MiB``."""
    return ", ".join(
        f"{key} = {show_bytes(value) if _unit(key) == 'bytes' else _value_text(value)}" for key, value in values.items()
    )


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


class SettingDescription(NamedTuple):
    """One setting of ``qmq serve`` for users. ``minimum`` and ``maximum`` are None where it has no bounds."""

    key: str
    default: int | str | list[str] | None
    unit: str
    minimum: int | None
    maximum: int | None
    allowed: str
    description: str


def describe() -> list[SettingDescription]:
    """Return the description of every setting, in the order of the model."""
    return [
        SettingDescription(
            key=key,
            default=_plain(field.default),
            unit=_unit(key),
            minimum=_bounds(field)[0],
            maximum=_bounds(field)[1],
            allowed=_allowed(key, field),
            description=field.description or "",
        )
        for key, field in Settings.model_fields.items()
    ]


def _plain(value: Any) -> int | str | list[str] | None:
    if isinstance(value, tuple):
        return [str(part) for part in value]
    return value if value is None or isinstance(value, int) else str(value)


def _unit(key: str) -> str:
    suffix = key.removesuffix("_per_s").rpartition("_")[2]
    return suffix if suffix in ("bytes", "ms") else ""


def _bounds(field: FieldInfo) -> tuple[int | None, int | None]:
    least = next((int(rule.ge) for rule in field.metadata if isinstance(rule, Ge)), None)  # type: ignore[call-overload]  # Ge takes any type that compares
    most = next((int(rule.le) for rule in field.metadata if isinstance(rule, Le)), None)  # type: ignore[call-overload]  # likewise
    return least, most


def _allowed(key: str, field: FieldInfo) -> str:
    least, most = _bounds(field)
    match _unit(key):
        case "bytes":
            return f"{show_bytes(least or 0)} to {show_bytes(most or 0)}, in bytes or as text such as '256 MiB'"
        case "ms":
            return f"a whole number of milliseconds from {least} to {most}, or a text such as '30s' or '7d'"
        case _ if least is not None:
            return f"a whole number from {least} to {most}"
    texts = {
        "data_dir": "the path of a directory",
        "partition_dirs": "the paths of directories, separated by commas",
        "listen": "HOST:PORT, such as 127.0.0.1:20881 or [::1]:20881, or several of them separated by commas",
        "advertise": "HOST:PORT with a port that is not 0",
        "tls_cert": "the path of a PEM file, and tls_key with it",
        "tls_key": "the path of a PEM file, and tls_cert with it",
        "tls_client_ca": "the path of a PEM file, and tls_cert with it",
        "tokens_file": "the path of a file",
        "insecure": "true or false",
        "log_level": "debug, info, warning or error",
        "log_format": "text or json",
        "retention_needs_archive": "yes or no",
    }
    return texts[key]
