"""Every attack of the bench strikes, and the bench reports its cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.bench import resources
from qmq.bench.attacks import ATTACKS
from qmq.bench.context import Bench
from qmq.bench.processes import BrokerProcess, LoadWorker
from qmq.bench.values import GOALS
from tests.bench.conftest import TINY


@pytest.mark.parametrize("how", ATTACKS)
def test_each_attack_strikes(bench: Bench, broker: BrokerProcess, tmp_path: Path, how: str) -> None:
    prefix = bench.prefix()
    bench.fill(broker.url, prefix + "large", 100, 1_000)
    options = {"how": how, "url": broker.url, "connections": 50, "prefix": prefix}
    with LoadWorker(tmp_path, "attacks.run", options) as attack:
        attack.go()
        assert attack.result()["struck"] > 0
    assert ("untrusted_clients", f"{how}: rate, relative to alone") in GOALS


def test_what_an_attack_costs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "ATTACKS", ["floods"])
    bench = Bench(tmp_path, TINY, None, {"segment_bytes": "32MiB"})
    found = {value.what: value.value for value in resources.untrusted_clients(bench)}
    print(found)
    assert found.pop("floods: rate, relative to alone") > 0
    assert found.pop("floods: strikes") > 0
    assert 0 < found.pop("RssAnon") < 200
    assert 0 <= found.pop("floods: cpu of the broker for the attack") < 1.5
    assert found.pop("floods: cpu of the attackers") > 0
    assert found.keys() == {"floods: p99", "floods: p99 alone"}
