"""qmq/settings.py: defaults, bounds, where a value comes from, and what a bad one is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from qmq.errors import InvalidOption
from qmq.settings import MIB, Bytes, Settings, describe, load, parse_address, parse_addresses, show_bytes


def toml(directory: Path, text: str) -> Path:
    path = directory / "qmq.toml"
    path.write_text(text, "utf-8")
    return path


def test_defaults_are_those_of_the_design() -> None:
    settings = load()
    assert settings.data_dir == Path("qmq-data")
    assert settings.listen == "127.0.0.1:20881"
    assert (settings.segment_bytes, settings.checkpoint_ms) == (256 * MIB, 1_000)
    assert (settings.max_frame_bytes, settings.max_message_bytes) == (16 * MIB, 4 * MIB)
    assert (settings.max_subjects, settings.max_groups, settings.max_producers) == (1_000_000, 10_000, 100_000)
    assert (settings.producer_window, settings.producer_ttl_ms) == (64, 3_600_000)


def test_defaults_pass_their_own_bounds() -> None:
    given = {d.key: d.default for d in describe() if d.default is not None}
    assert Settings.model_validate(given) == Settings()


def test_flags_win_over_set_over_file_over_default(tmp_path: Path) -> None:
    path = toml(tmp_path, 'partitions = 2\nmax_groups = 20\nmax_subjects = 200\nlisten = "127.0.0.1:1"')
    settings = load(path, ["max_groups=30", "max_subjects=300"], {"max_subjects": 400, "listen": None})
    assert (settings.partitions, settings.max_groups, settings.max_subjects) == (2, 30, 400)
    assert settings.listen == "127.0.0.1:1"  # a flag that was not given hides nothing
    assert settings.producer_window == 64


def test_the_last_of_two_assignments_counts() -> None:
    assert load(None, ["partitions=2", " partitions = 3 "]).partitions == 3


@pytest.mark.parametrize("text", ["33554432", "32 MiB", "32MiB", "32768 KiB"])
def test_sizes_are_bytes_or_text(tmp_path: Path, text: str) -> None:
    assert load(None, [f"segment_bytes={text}"]).segment_bytes == 32 * MIB
    assert load(toml(tmp_path, f'segment_bytes = "{text}"')).segment_bytes == 32 * MIB


def test_lists_of_directories(tmp_path: Path) -> None:
    wanted = (Path("/disk1/qmq"), Path("/disk2/qmq"))
    assert load(None, ["partitions=2", "partition_dirs=/disk1/qmq,/disk2/qmq"]).partition_dirs == wanted
    path = toml(tmp_path, 'partitions = 2\npartition_dirs = ["/disk1/qmq", "/disk2/qmq"]')
    assert load(path).partition_dirs == wanted


@pytest.mark.parametrize(
    ("assignment", "allowed"),
    [
        ("partitions=0", "1 to 256"),
        ("partitions=257", "1 to 256"),
        ("partitions=two", "a whole number"),
        ("partitions=1.5", "a whole number"),
        ("partitions=", "a whole number"),
        ("partitions=-1", "a whole number"),
        ("segment_bytes=64 kilos", "64 KiB to 4 GiB"),
        ("segment_bytes=8 GiB", "64 KiB to 4 GiB"),
        ("checkpoint_ms=9", "milliseconds from 10"),
        ("data_dir=", "the path of a directory"),
        ("listen=localhost", "HOST:PORT"),
        ("listen=:20881", "HOST:PORT"),
        ("listen=::1:20881", "[::1]:20881"),
        ("listen=127.0.0.1:65536", "HOST:PORT"),
        ("listen=127.0.0.1:²", "HOST:PORT"),
        ("listen=127.0.0.1:1,", "several of them separated by commas"),
        ("advertise=broker.example:0", "not 0"),
        ("log_level=loud", "debug, info, warning or error"),
        # each fine by itself, not together with the default of another
        ("segment_bytes=1 MiB", "max_frame_bytes"),
        ("max_message_bytes=16 MiB", "max_frame_bytes"),
        ("reserve_bytes=32 MiB", "max_frame_bytes"),
        ("partition_dirs=/a,/b", "each of the 1 partitions"),
    ],
)
def test_a_bad_value_names_key_source_value_and_allowed_values(assignment: str, allowed: str) -> None:
    key, _, value = assignment.partition("=")
    with pytest.raises(InvalidOption) as caught:
        load(None, [assignment])
    message = str(caught.value)
    assert message.startswith(f"{key} = {value!r} (--set) is not allowed; give ")
    assert allowed in message
    assert "\n" not in message


def test_a_default_that_no_longer_fits_is_named_too() -> None:
    with pytest.raises(InvalidOption, match=r"segment_bytes = 268435456 \(the default\) is not allowed; give at least"):
        load(None, ["max_frame_bytes=512 MiB"])


@pytest.mark.parametrize("line", ["partitions = true", "partitions = 2.0", "partitions = [2]", "data_dir = 7"])
def test_the_file_is_checked_as_strictly(tmp_path: Path, line: str) -> None:
    path = toml(tmp_path, line)
    with pytest.raises(InvalidOption, match="is not allowed") as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_unknown_keys_are_refused_with_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match=r"'partition' \(--set\) is not a setting, did you mean 'partitions'\?"):
        load(None, ["partition=2"])
    with pytest.raises(
        InvalidOption, match=r"'colour' \(.*qmq.toml\) is not a setting; `qmq config` lists all settings"
    ):
        load(toml(tmp_path, "colour = 1"))
    with pytest.raises(ValidationError):
        Settings.model_validate({"colour": 1})


def test_an_assignment_without_a_value_is_refused() -> None:
    with pytest.raises(InvalidOption, match="--set 'partitions' is not key=value"):
        load(None, ["partitions"])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match=r"nowhere.toml cannot be read: No such file"):
        load(tmp_path / "nowhere.toml")
    with pytest.raises(InvalidOption, match=r"is not TOML: .*line 1"):
        load(toml(tmp_path, "partitions 2"))
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9")
    with pytest.raises(InvalidOption, match="is not TOML"):
        load(tmp_path / "latin.toml")


def test_settings_cannot_change_under_a_broker() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load().partitions = 2  # type: ignore[misc]


def test_every_setting_is_described_with_its_unit_and_bounds() -> None:
    described = describe()
    assert [d.key for d in described] == list(Settings.model_fields)
    for setting in described:
        assert setting.description.endswith("."), setting.key
        assert setting.allowed, setting.key
        if type(setting.default) is int:
            assert setting.minimum is not None, setting.key
            assert setting.maximum is not None, setting.key
            assert setting.minimum <= setting.default <= setting.maximum, setting.key
        if setting.key.endswith(("_bytes", "_ms")):
            assert setting.unit == setting.key.rpartition("_")[2]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::1]:20881", ("::1", 20881)),
        ("broker.example:65535", ("broker.example", 65535)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


def test_several_addresses() -> None:
    assert parse_addresses("[::1]:1, 127.0.0.1:2") == [("::1", 1), ("127.0.0.1", 2)]


@pytest.mark.parametrize("count", [1, 1023, 1024, 1536, 65536, MIB, 3 * MIB + 1024, 1 << 30])
def test_sizes_read_back_as_shown(count: int) -> None:
    assert TypeAdapter(Bytes).validate_python(show_bytes(count)) == count


def test_the_environment_wins_over_the_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "qmq.toml"
    path.write_text('partitions = 2\nlisten = "127.0.0.1:1"\nlog_level = "error"\n', "utf-8")
    environment = {
        "QMQ_PARTITIONS": "3", "QMQ_LISTEN": "127.0.0.1:2", "QMQ_LOG_LEVEL": "", "PARTITIONS": "9",
        "QMQ_SEGMENT_BYTES": "64 MiB", "QMQ_SERVER": "qmq://a",
    }  # fmt: skip
    settings = load(path, ["listen=127.0.0.1:3"], {"data_dir": "there"}, {**environment, "QMQ_DATA_DIR": "here"})
    assert (settings.partitions, settings.listen, settings.log_level) == (3, "127.0.0.1:3", "error")
    assert (settings.data_dir, settings.segment_bytes) == (Path("there"), 64 * MIB)
    with pytest.raises(InvalidOption, match=r"partitions = 'x' \(QMQ_PARTITIONS\) is not allowed"):
        load(environment={"QMQ_PARTITIONS": "x"})
