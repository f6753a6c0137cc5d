"""Look-ups of hosts while a name server hangs."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import qmq
from qmq.net.client import broker_link, look_ups
from qmq.net.client.address import Address
from qmq.net.client.look_ups import LookUps
from tests.broker_process import BrokerProcess, broker_process
from tests.net.several import until


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("look-ups") / "data") as started:
        yield started


class NameServer:
    """Answers for each host but those that hang, until they go on."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self._real = real
        self.hanging: set[str] = set()
        self.asked: list[str] = []
        self.goes_on = threading.Event()

    def __call__(self, host: str, port: int, *others: Any, flags: int = 0, **named: Any) -> Any:
        if host.startswith("127.") or flags & socket.AI_NUMERICHOST:
            return self._real(host, port, *others, flags=flags, **named)
        self.asked.append(host)
        if host in self.hanging:
            self.goes_on.wait(60)
        return self._real("127.0.0.1", port, *others, flags=flags, **named)


@pytest.fixture
def name_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    server = NameServer(socket.getaddrinfo)
    monkeypatch.setattr(socket, "getaddrinfo", server)
    yield server
    server.goes_on.set()


def running() -> int:
    return sum(thread.name == "qmq-look-up" for thread in threading.enumerate())


async def test_tries_share_the_look_up_that_hangs_and_other_hosts_connect(
    broker: BrokerProcess, name_server: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_link, "CONNECT_TIMEOUT", 0.02)
    monkeypatch.setattr(broker_link.Backoff, "next_delay", lambda _: 0.01)
    port = broker.url.rpartition(":")[2]
    name_server.hanging = {"hangs.example"}
    tries = 0

    class Counted(broker_link.BrokerConnection):
        async def open(self, address: Address, *others: Any) -> None:
            nonlocal tries
            tries += 1
            await super().open(address, *others)

    monkeypatch.setattr(broker_link, "BrokerConnection", Counted)
    hanging = qmq.connect(f"qmq://hangs.example:{port}", wait=60)
    connecting = asyncio.ensure_future(hanging.__aenter__())
    await until(lambda: tries >= 4, "it is tried again and again")
    assert name_server.asked == ["hangs.example"] * running() == ["hangs.example"]
    monkeypatch.setattr(broker_link, "CONNECT_TIMEOUT", 30.0)
    async with qmq.connect(f"qmq://answers.example:{port}") as client:
        await client.send("a", b"")
    name_server.goes_on.set()
    await connecting
    await hanging.send("a", b"")
    await hanging.close()
    await until(lambda: running() == 0, "no thread is left")


async def test_who_waits_for_one_host_gets_one_answer(name_server: NameServer) -> None:
    several, address = LookUps(), Address("name.example", 7)
    name_server.hanging = {"name.example"}
    waiting = [asyncio.ensure_future(several.of(address)) for _ in range(5)]
    await until(lambda: bool(name_server.asked), "it is looked up")
    waiting[0].cancel()
    name_server.goes_on.set()
    found = await asyncio.gather(*waiting[1:])
    assert [addresses[0][4] for addresses in found] == [("127.0.0.1", 7)] * 4
    assert name_server.asked == ["name.example"]
    assert waiting[0].cancelled()
    await several.of(address)
    assert name_server.asked == ["name.example"] * 2, "the next one asks anew"


async def test_an_error_comes_to_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    several, address = LookUps(), Address("nobody.example", 7)
    errors = await asyncio.gather(*(several.of(address) for _ in range(3)), return_exceptions=True)
    assert [str(error) for error in errors] == ["[Errno -2] Name or service not known"] * 3


async def test_a_program_has_few_threads_that_hang(name_server: NameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_ups, "MOST_LOOK_UPS", 3)
    several = LookUps()
    name_server.hanging = {f"{number}.example" for number in range(3)}
    waiting = [asyncio.ensure_future(several.of(Address(f"{number}.example", 7))) for number in range(3)]
    await until(lambda: len(name_server.asked) == 3, "all are looked up")
    with pytest.raises(OSError, match="3 other hosts hang"):
        await several.of(Address("another.example", 7))
    name_server.goes_on.set()
    await asyncio.gather(*waiting)
    assert await several.of(Address("another.example", 7))


async def test_a_host_is_looked_up_again_where_no_thread_began(
    name_server: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    several, address = LookUps(), Address("name.example", 7)

    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none_left)
        with pytest.raises(RuntimeError, match="can't start"):
            await several.of(address)
    assert await several.of(address)


def test_the_child_of_a_fork_waits_for_no_look_up_of_its_parent(name_server: NameServer) -> None:
    name_server.hanging = {"hangs.example"}
    address = Address("hangs.example", 7)

    async def begin() -> None:
        waiting = asyncio.ensure_future(look_ups.LOOK_UPS.of(address))
        await until(lambda: bool(name_server.asked), "it is looked up")
        child = os.fork()
        if not child:
            name_server.hanging.clear()
            os._exit(0 if asyncio.new_event_loop().run_until_complete(_in_child(address)) else 1)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        name_server.goes_on.set()
        await waiting
        assert os.waitstatus_to_exitcode(status) == 0

    asyncio.run(begin())


async def _in_child(address: Address) -> bool:
    async with asyncio.timeout(60):
        return bool(await look_ups.LOOK_UPS.of(address))
