"""qmq/cli/manage/subjects.py: the subjects of a prefix, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from qmq.cli.manage.subjects import _print_table
from qmq.net.client.admin.results import SubjectInfo
from tests.broker_process import BrokerProcess, broker_process
from tests.cli.commands import qmq


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("subjects")) as broker:
        lines = [json.dumps({"subject": f"many.s{number}", "body": "x"}) for number in range(2_500)]
        lines += [json.dumps({"subject": name, "body": "x"}) for name in ("b.two", "b.one", "b.two", "bb")]
        done = qmq("produce", "--json", stdin="\n".join(lines).encode(), server=broker.url)
        assert done.stdout == "2504 acknowledged\n", done.stderr
        yield broker


def test_lines_with_tabs(broker: BrokerProcess) -> None:
    shown = qmq("subjects", "b.", server=broker.url)
    assert (shown.exit_code, shown.stdout, shown.stderr) == (0, "b.two\t2\t0\t2\t0\nb.one\t1\t0\t1\t0\n", "")


def test_an_exact_name_is_that_subject(broker: BrokerProcess) -> None:
    assert qmq("subjects", "bb", server=broker.url).stdout == "bb\t1\t0\t1\t0\n"
    assert qmq("subjects", "b", server=broker.url).stdout == ""


def test_json_lists_all_over_several_pages(broker: BrokerProcess) -> None:
    shown = qmq("subjects", "--json", server=broker.url)
    rows = [json.loads(line) for line in shown.stdout.splitlines()]
    assert len(rows) == 2_503
    assert rows[0].pop("broker").startswith("127.0.0.1:")
    assert rows[0] == {"subject": "many.s0", "messages": 1, "first_sequence": 0, "next_sequence": 1, "delayed": 0}
    assert len({row["subject"] for row in rows}) == 2_503


def test_what_is_delayed_is_shown_of_its_subject(broker: BrokerProcess) -> None:
    assert qmq("produce", "late.a", "--delay", "3600", stdin=b"x\ny\n", server=broker.url).exit_code == 0
    assert qmq("produce", "late.b", stdin=b"x\n", server=broker.url).exit_code == 0
    assert qmq("subjects", "late.", server=broker.url).stdout == "late.a\t0\t0\t0\t2\nlate.b\t1\t0\t1\t0\n"


def test_a_table_goes_by_name_and_says_when_it_is_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qmq.cli.manage.subjects._MOST_ROWS", 20)
    _print_table([SubjectInfo(f"s.{number}", 0, 2_000, 2_000, 0, "here") for number in range(19, -1, -1)])
    whole = capsys.readouterr().out
    assert whole.index(" s.0 ") < whole.index(" s.1 ") < whole.index(" s.19 ") < whole.index(" s.2 ")
    assert "20 subjects, 40,000 messages" in whole
    assert "--json" not in whole
    _print_table([SubjectInfo(f"s.{number}", 0, 5, 5, 0, "here") for number in range(21)])
    cut = capsys.readouterr().out
    assert "the first 20 are shown, --json lists all" in " ".join(cut.split())
    assert " s.8 " in cut
    assert " s.9 " not in cut


@pytest.mark.parametrize("prefix", ["..", "a b", "a" * 201, "/"])
def test_a_bad_prefix_ends_with_2(prefix: str) -> None:
    done = qmq("subjects", prefix)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "prefix" in done.stderr


def test_no_broker() -> None:
    done = qmq("subjects", server="qmq://127.0.0.1:1")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("qmq: no broker")
