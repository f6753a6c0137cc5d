"""One consumer at several brokers, which pulls from all of them as from one.

A pull first asks one broker after another for the missing messages, so that it takes no more than it needs; it begins
with the broker after the one that answered last. When each broker has given the messages that it had, the pull waits at
all of them at once. Messages beyond the requested count stay with the puller of their broker and come first in the next
pull.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Final

from qmq.durations import Duration
from qmq.errors import QmqError, UnknownGroup
from qmq.format.layout import LANE_ORDERED
from qmq.format.run import Run
from qmq.net.client.brokers import Brokers
from qmq.net.client.consumer.acks import AckSender
from qmq.net.client.consumer.pull import Puller, open_runs, release
from qmq.net.client.group_settings import DEFAULT_TERMS, SubscriptionTerms
from qmq.net.client.options import PULL_BYTES, Start, check_pull, make_consumer_id
from qmq.net.client.tasks import begin_task

#: Seconds to wait for one broker's messages at hand before the next broker is asked.
TURN_TIMEOUT: Final = 0.05

#: In an at_most_once group: when fewer messages are missing than there are brokers, the pull waits this many seconds at
#: some brokers, then at the next ones.
TURN: Final = 0.25

#: In an at_most_once group: seconds to wait for the answers to withdrawn pulls before other brokers are asked. A broker
#: that takes longer is not asked again before it has answered, so it costs this time once.
SETTLE_TIMEOUT: Final = 1.0


def make_puller(
    brokers: Brokers,
    prefixes: Sequence[str],
    group: str | None,
    consumer: str | None,
    start: Start,
    terms: SubscriptionTerms = DEFAULT_TERMS,
) -> Puller | MultiBrokerPuller:
    """Make the puller of a consumer: one per broker, merged if there are several. Raises InvalidName, InvalidOption."""
    if len(brokers.links) == 1:
        return _guarded(Puller(brokers.links[0], prefixes, group, consumer, start, terms), brokers, group, terms)
    is_transient = consumer is None
    consumer = make_consumer_id() if consumer is None else consumer
    pullers = [Puller(link, prefixes, group, consumer, start, terms, is_transient) for link in brokers.links]
    guarded = [_guarded(puller, brokers, group, terms) for puller in pullers]
    return MultiBrokerPuller(guarded, terms.mode == "at_most_once", looks=terms.looks)


def _guarded(puller: Puller, brokers: Brokers, group: str | None, terms: SubscriptionTerms) -> Puller:
    """Give *puller* the other brokers, which take its nacked messages when its broker is gone."""
    if puller.ack_sender is not None and group is not None and brokers.handover.after is not None:
        name = f"{group}@{puller.id}" if terms.mode == "broadcast" else group  # one per member
        puller.ack_sender.nack_sender.handover = brokers.handover, name
    return puller


class MultiBrokerPuller:
    """Pulls for a consumer at several brokers. Pulls of several tasks run one after another.

    *is_exact* (at_most_once groups): never ask all brokers together for more messages than the pull still needs,
    because messages left over would be lost when the consumer leaves.
    """

    def __init__(self, pullers: Sequence[Puller], is_exact: bool = False, *, looks: bool = False) -> None:
        """*looks*: leave out brokers that do not know the group, as long as one broker knows it."""
        self._looks = looks
        self._unknown: list[UnknownGroup] = []
        self._pullers = list(pullers)
        for ack_sender in self.ack_senders[1:]:
            ack_sender.warned_of = self.ack_senders[0].warned_of
            ack_sender.thread_dispositions = self.ack_senders[0].thread_dispositions
        self._is_exact = is_exact
        self._entering: set[asyncio.Task[None]] = set()
        self._entered: set[Puller] = set()
        self._returned: deque[Run] = deque()  # returned by a solo consumer
        self._taken: list[Run] = []  # received by the pull under way
        self._next = 0  # index of the puller to ask first
        self._slow: set[Puller] = set()  # pullers that did not answer in time
        self._tasks: dict[Puller, asyncio.Task[list[Run]]] = {}
        self._asked: dict[Puller, int] = {}  # for how many messages each was asked last
        self._max_bytes = PULL_BYTES  # of each answer
        self._lock = asyncio.Lock()

    @property
    def id(self) -> str:
        """The consumer's id."""
        return self._pullers[0].id

    @property
    def damaged(self) -> int:
        """How many pieces of answers were left out because they are damaged."""
        return sum(puller.damaged for puller in self._pullers)

    @property
    def ack_senders(self) -> list[AckSender]:
        """The senders of acks at all brokers."""
        return [ack_sender for puller in self._pullers for ack_sender in puller.ack_senders]

    @property
    def pullers(self) -> list[Puller]:
        """The pullers of the consumer, one for each broker."""
        return self._pullers

    @property
    def is_at_most_once(self) -> bool:
        """Whether the broker hands out each message once, so that no other consumer gets those that are left over."""
        return self._is_exact

    @property
    def is_solo(self) -> bool:
        """Whether the consumer sends no dispositions."""
        return self._pullers[0].is_solo

    # --- life --------------------------------------------------------------------------------------------------------

    async def enter(self) -> None:
        """Subscribe at all brokers; return once one has answered. Raises a broker's refusal."""
        loop = asyncio.get_running_loop()
        tasks = {begin_task(self._enter_one(puller), loop, "qmq-subscribe") for puller in self._pullers}
        try:
            done, self._entering = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._entering:  # let brokers that are up take part from the first pull on
                more, self._entering = await asyncio.wait(self._entering, timeout=TURN_TIMEOUT)
                done |= more
            for task in done:
                task.result()
            if len(self._unknown) == len(self._pullers):
                raise self._unknown[0]
        except Exception:
            self._entering = tasks
            await self.leave()
            raise
        except BaseException:  # a cancellation, or the end of the coroutine: no code may wait here
            self._entering = tasks
            self.leave_now()
            raise

    async def _enter_one(self, puller: Puller) -> None:
        try:
            await puller.enter()
        except UnknownGroup as error:
            if not self._looks:
                raise
            self._unknown.append(error)
            return
        self._entered.add(puller)

    async def leave(self, error: BaseException | None = None, *, closes: bool = False) -> None:
        """Unsubscribe at all brokers; pulls that wait raise UnknownSubscription. See ``Puller.leave``."""
        if isinstance(error, Exception) and not self.is_solo:
            release(self._on_the_way())
        try:
            for task in self._entering:
                task.cancel()
            await asyncio.gather(*self._entering, return_exceptions=True)
            await asyncio.gather(*(puller.leave(error, closes=closes) for puller in self._pullers))
        finally:
            self.leave_now()

    def _on_the_way(self) -> list[Run]:
        """Return the runs that the pull under way has received and not returned."""
        done = [task for task in self._tasks.values() if task.done() and not task.cancelled() and not task.exception()]
        return [*self._taken, *(run for task in done for run in task.result())]

    def leave_now(self) -> None:
        """Leave all brokers, as ``Puller.leave_now``."""
        for task in self._entering:
            task.cancel()
        for puller in self._pullers:
            puller.leave_now()

    async def flush(self) -> None:
        """Wait until every ack so far is confirmed or refused."""
        await asyncio.gather(*(puller.flush() for puller in self._pullers))

    # --- pulling -----------------------------------------------------------------------------------------------------

    async def pull(
        self, max_count: int, min_count: int, timeout: Duration | None, max_bytes: int = PULL_BYTES
    ) -> list[Run]:
        """Pull as ``Puller.pull`` does, from all brokers; each gives at most *max_bytes*."""
        timeout = check_pull(max_count, min_count, timeout)
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        try:
            async with asyncio.timeout_at(deadline):
                await self._lock.acquire()
        except TimeoutError:
            return []
        taken = self._taken = self._take_returned(max_count)
        self._max_bytes = max_bytes
        try:
            await self._pull_alone(taken, max_count, min_count, deadline)
        except BaseException:
            try:
                await self._withdraw()
            finally:
                self.put_back(taken)
            raise
        finally:
            self._taken = []
            self._lock.release()
        return taken

    async def _pull_alone(self, taken: list[Run], max_count: int, min_count: int, deadline: float | None) -> None:
        for puller in self._in_order():
            if self._is_enough(taken, min_count):
                break
            if puller not in self._tasks:
                self._ask(puller, max_count - _count(taken), 0.0)
            await self._wait({puller}, 0.0 if puller in self._slow else TURN_TIMEOUT, taken)
            if puller in self._tasks:
                if self._is_exact:
                    await self._end(taken, max_count)
                else:
                    self._slow.add(puller)
        while True:
            left = None if deadline is None else deadline - asyncio.get_running_loop().time()
            if self._is_enough(taken, min_count) or (left is not None and left <= 0):
                await self._end(taken, max_count)
                if not _drop_early_returns(taken) or (left is not None and left <= 0):
                    break
                continue
            for puller, most in self._shares(max_count - _count(taken)):
                self._ask(puller, most, left)
            if self._is_exact and len(self._tasks) < len(self._entered):
                await self._wait(set(self._tasks), TURN if left is None else min(left, TURN), taken)
                await self._end(taken, max_count)
                self._next = (self._next + 1) % len(self._pullers)
            else:
                await self._wait(set(self._tasks), left, taken)
            _drop_early_returns(taken)
        self._cut(taken, max_count)

    async def _end(self, taken: list[Run], max_count: int) -> None:
        """End the pulls under way. For an at_most_once group, take the messages that they still bring: the broker does
        not hand them out again.
        """
        pullers = list(self._tasks)
        await self._withdraw()
        if not self._is_exact:
            return
        await asyncio.gather(*(puller.settle(SETTLE_TIMEOUT) for puller in pullers))
        for puller in pullers:
            missing = max_count - _count(taken)
            if missing > 0 and puller.has_received:
                taken += await puller.pull(missing, 1, 0.0, self._max_bytes)

    def _shares(self, missing: int) -> list[tuple[Puller, int]]:
        """Return the pullers to ask now, and for how many messages each."""
        idle = [puller for puller in self._in_order() if puller not in self._tasks]
        if not self._is_exact or not idle:
            return [(puller, missing) for puller in idle]
        each, more = divmod(missing - sum(self._asked[puller] for puller in self._tasks), len(idle))
        shares = [(puller, each + (at < more)) for at, puller in enumerate(idle)]
        return [(puller, share) for puller, share in shares if share]

    def _in_order(self) -> list[Puller]:
        """Return the pullers that have subscribed: first those with messages left over, then in turn. In an
        at_most_once group, leave out those whose broker has not answered an earlier pull.
        """
        in_turn = self._pullers[self._next :] + self._pullers[: self._next]
        order = [one for one in in_turn if self._is_in(one) and not (self._is_exact and one.is_waiting)]
        return sorted(order, key=lambda puller: not puller.has_received)

    def _is_in(self, puller: Puller) -> bool:
        """Return whether *puller* has subscribed. Raises a broker's refusal, so that the program learns of it."""
        for task in [task for task in self._entering if task.done()]:
            self._entering.discard(task)
            task.result()
        return puller in self._entered

    def _ask(self, puller: Puller, most: int, timeout: float | None) -> None:
        task = begin_task(puller.pull(most, 1, timeout, self._max_bytes), asyncio.get_running_loop(), "qmq-pull")
        self._tasks[puller], self._asked[puller] = task, most

    async def _wait(self, pullers: set[Puller], timeout: float | None, taken: list[Run]) -> None:
        """Wait until one of *pullers* has answered, and collect its messages."""
        waiting: set[asyncio.Task[list[Run]] | asyncio.Task[None]] = {self._tasks[puller] for puller in pullers}
        waiting |= self._entering
        if not waiting:
            await asyncio.sleep(TURN_TIMEOUT if timeout is None else min(TURN_TIMEOUT, timeout))
            return
        await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        self._collect(taken)

    def _collect(self, taken: list[Run]) -> None:
        """Append the messages of the pulls that are done to *taken*. Raises their errors."""
        failure: QmqError | None = None
        for puller, task in [(puller, task) for puller, task in self._tasks.items() if task.done()]:
            del self._tasks[puller]
            self._slow.discard(puller)
            if task.cancelled():
                continue
            error = task.exception()
            if isinstance(error, QmqError):
                failure = error
            elif error is not None:
                raise error
            elif runs := task.result():
                taken += runs
                self._next = (self._pullers.index(puller) + 1) % len(self._pullers)
        if failure is not None:
            raise failure

    async def _withdraw(self) -> None:
        """End the pulls under way; messages that they still bring come first in the next pull."""
        if not self._tasks:
            return
        tasks, self._tasks = self._tasks, {}
        for puller, task in tasks.items():
            task.cancel()
            task.add_done_callback(partial(_came_late, puller))  # even when no code waits for it any more
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    def _is_enough(self, runs: Sequence[Run], min_count: int) -> bool:
        return _count(runs) >= min_count or sum(len(run.data) for run in runs) >= self._max_bytes

    # --- what is left over -------------------------------------------------------------------------------------------

    def put_back(self, runs: Sequence[Run]) -> None:
        """Return *runs* to their pullers, which hand them out first in the next pull."""
        for run in reversed(runs):
            for puller in self._pullers:
                if (
                    puller.ack_sender is not None
                    and run.in_flight is not None
                    and puller.ack_sender is run.in_flight.owner
                ):
                    puller.put_back([run])
                    break
            else:
                self._returned.appendleft(run)

    def _take_returned(self, max_count: int) -> list[Run]:
        taken, left = list[Run](), max_count
        while self._returned and left:
            run = self._returned.popleft()
            if run.count > left:
                self._returned.appendleft(run.slice(left, run.count))
                run = run.slice(0, left)
            taken.append(run)
            left -= run.count
        return taken

    def _cut(self, taken: list[Run], max_count: int) -> None:
        """Keep messages beyond *max_count* for the next pull: several brokers may have answered at once."""
        count, at = 0, 0
        while at < len(taken) and count + taken[at].count <= max_count:
            count += taken[at].count
            at += 1
        if at == len(taken):
            return
        run, rest = taken[at], max_count - count
        beyond = [run.slice(rest, run.count), *taken[at + 1 :]] if rest else taken[at:]
        taken[at:] = [run.slice(0, rest)] if rest else []
        self.put_back(beyond)


def _came_late(puller: Puller, task: asyncio.Task[list[Run]]) -> None:
    """Keep the messages of a pull that was withdrawn and has ended for the next pull."""
    if not task.cancelled() and task.exception() is None:
        puller.put_back(task.result())


def _drop_early_returns(taken: list[Run]) -> bool:
    """Remove the messages that have gone back, while the pull waited, because of an earlier one of their order key;
    return whether there were any.
    """
    if not any(run.lane >= LANE_ORDERED and run.in_flight is not None and run.in_flight.taken_back for run in taken):
        return False
    before = _count(taken)
    taken[:] = open_runs(taken)
    return _count(taken) < before


def _count(runs: Sequence[Run]) -> int:
    return sum(run.count for run in runs)
