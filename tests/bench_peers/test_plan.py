"""The order of things: rounds interleaved over peers, and no peer always after the same one."""

from __future__ import annotations

import pytest

from bench.peers import registry, works
from bench.peers.peer import Peer, Promise
from bench.peers.plan import steps
from qmq.errors import InvalidOption


def test_every_round_does_everything_with_peers_in_turn(missing: Peer) -> None:
    peers = [*registry.chosen(["kafka", "redis"]), missing]
    done = list(steps(peers, ["move", "latency"], 4))
    for number in range(4):
        of_round = [step for step in done if step.number == number]
        for work in ("move", "latency"):
            names = list(dict.fromkeys(step.peer.name for step in of_round if step.work == work))
            assert sorted(names) == ["kafka", "missing", "qmq", "redis"]
            assert names[0] == peers[number % 4].name
        # Rounds of one work do not follow each other: other peers and works lie between.
        assert {step.work for step in of_round} == {"move", "latency"}
    assert [step.number for step in done] == sorted(step.number for step in done)


def test_a_peer_does_what_it_can_promise(missing: Peer) -> None:
    (qmq,) = registry.chosen(["qmq"])
    done = list(steps([qmq, missing], ["move"], 1))
    assert [(step.peer.name, step.promise) for step in done] == [
        ("qmq", Promise.PAGE_CACHE), ("qmq", Promise.FSYNC), ("missing", Promise.FSYNC)
    ]  # fmt: skip


def test_a_work_under_one_promise_takes_the_weaker_one_that_is_kept(missing: Peer) -> None:
    (qmq,) = registry.chosen(["qmq"])
    once = works.Work(works.WORKS["move"].do, both=False)
    assert once.promises(qmq) == [Promise.PAGE_CACHE]
    assert once.promises(missing) == [Promise.FSYNC]


def test_what_a_peer_lacks_is_not_tried(missing: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    (qmq,) = registry.chosen(["qmq"])
    monkeypatch.setattr(type(missing), "lacks", {"failing": "it has no nack"})
    done = list(steps([qmq, missing], ["failing", "idle"], 1))
    assert [(step.peer.name, step.work) for step in done] == [("qmq", "failing"), ("qmq", "idle"), ("missing", "idle")]


def test_a_work_for_which_no_client_has_a_way_is_not_tried(missing: Peer) -> None:
    peers = [*registry.chosen(["kafka", "redis", "nats"]), missing]
    done = list(steps(peers, ["keys", "limits"], 1))
    assert {step.peer.name for step in done} == {"qmq", "kafka", "redis"}
    assert all(step.promise is Promise.PAGE_CACHE for step in done)


@pytest.mark.parametrize("peer", registry.PEERS.values(), ids=list(registry.PEERS))
def test_a_peer_does_every_work_or_says_why_not(peer: Peer) -> None:
    assert set(peer.lacks) <= set(works.WORKS)
    assert any("failing" in client.consumes for client in peer.clients) != ("failing" in peer.lacks)
    assert any(client.paced for client in peer.clients)


def test_nobody_to_measure_is_no_work() -> None:
    assert list(steps([], ["move"], 3)) == []


def test_qmq_is_always_among_the_peers() -> None:
    assert [peer.name for peer in registry.chosen(["redis"])] == ["qmq", "redis"]
    assert [peer.name for peer in registry.chosen([])] == list(registry.PEERS)
    with pytest.raises(InvalidOption, match="there is no peer 'kafak'; there are qmq, kafka"):
        registry.chosen(["kafak"])


def test_send_and_consume_are_one_run() -> None:
    assert works.chosen(["consume", "send"]) == ["move"]
    assert works.chosen(["latency", "send"]) == ["move", "latency"]
    assert works.chosen([]) == list(works.WORKS)
    with pytest.raises(InvalidOption, match="there is no work 'snd'; there are move"):
        works.chosen(["snd"])


@pytest.mark.parametrize("peer", registry.PEERS.values(), ids=list(registry.PEERS))
def test_every_peer_says_how_it_keeps_each_promise_or_why_not(peer: Peer) -> None:
    assert set(peer.promises) | set(peer.cannot) == set(Promise)
    assert not set(peer.promises) & set(peer.cannot)
    assert peer.promises


@pytest.mark.parametrize("peer", registry.PEERS.values(), ids=list(registry.PEERS))
def test_every_way_is_held_against_one_of_qmq(peer: Peer) -> None:
    """Without such a way of QMQ there would be no ratio."""
    (ours,) = registry.PEERS["qmq"].clients
    for client in peer.clients:
        for ways, own in (
            (client.sends, ours.sends), (client.consumes, ours.consumes), (client.paced, ours.paced),
            (client.keyed, ours.keyed), (client.limited, ours.limited), (client.spread, ours.spread),
        ):  # fmt: skip
            assert {way.like or name for name, way in ways.items()} <= set(own)
        assert bool(client.paced) == ("paced" in client.consumes)
        assert all(way.rate > 0 for way in client.sends.values())
