"""Submissions of one run on clusters of their own over one storage, frozen and woken at any point, on a virtual clock.

`control.decisions.terms` decides; here are the storage, the delays and the promise: of those that run at most one
commits, and each other one stops within BOUND_S of the time in which it is awake. Claims may vanish, and each host has
a clock of its own. No clock, no ray.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from elastic_ring.control.decisions.terms import (
    LOOK_S,
    NOBODY,
    TermClaim,
    begin,
    is_late,
    newest_claim,
    refuse_if_replaced,
)
from elastic_ring.errors import ElasticRingError, RunFailed
from tests.sim.invariants import require
from tests.sim.simulator.simulate import AHEAD_S

SLOWEST_S = 0.3
"""One request to the storage takes at most so long."""
COMMIT_S = 0.7
"""Between two checkpoints of a submission."""
STATUS_S, WATCHED_S, WATCH_STEP_S = 1.0, 4.0, 0.2
"""A coordinator writes its status so often; a driver watches for a change of it for so long, in such steps."""
BOUND_S = LOOK_S + 2 * SLOWEST_S
ONE_COMMITS = 9
"""The number of the invariant."""

Turns = Generator[float, None, None]
"""A thread: yields for how many seconds it waits; what it does between two waits nothing interrupts."""


@dataclass
class Written:
    """A checkpoint: who wrote it, and in which folder."""

    attempt: str
    folder: str
    is_aside: bool = False


@dataclass
class TermStorage:
    """What all submissions share."""

    claims: list[TermClaim] = field(default_factory=list)
    withdrawn: set[int] = field(default_factory=set)
    written: list[Written] = field(default_factory=list)
    in_journal: int = 0
    """The newest term of which the journal has lines."""
    journal_of: str = ""
    """The submission that began it."""
    status: tuple[str, float] = "", 0.0
    """Who wrote it, and when by the clock of its host."""

    def newest(self) -> TermClaim:
        return newest_claim(self.claims, self.withdrawn)

    def at(self, term: int) -> TermClaim:
        return next((claim for claim in self.claims if claim.term == term), NOBODY)


class Submission:
    """One submission: its coordinator, with the thread that looks for a newer term and the one that commits."""

    def __init__(
        self, world: TermWorld, attempt: str, *, refused_at_read: int = 0, looks: bool = False, ahead_s: float = 0.0
    ) -> None:
        """`refused_at_read`: the first or second reading of the records refuses it; 0 for never. `looks`: its driver is
        refused where the status changes. `ahead_s`: of its host's clock."""
        self.world, self.attempt, self.refused_at_read = world, attempt, refused_at_read
        self.looks, self.ahead_s = looks, ahead_s
        self.follows = world.storage.journal_of
        self.looked_since = self.running_since = 0.0
        self.own: TermClaim | None = None
        self.began_with: set[str] = set()
        self.frozen_until = 0.0
        self.stopped = self.refused = False
        self.awake_s = 0.0  # since another submission's newer claim, while this one has not stopped
        self.num_starts = self.num_reads = self.last_seen = self.last_read = 0

    def start(self, *, is_restart: bool) -> None:
        self.num_starts += 1  # of those only the last process lives
        self.world.run(self, self._start(is_restart))

    def is_over(self, start: int) -> bool:
        return self.stopped or start != self.num_starts

    def _start(self, is_restart: bool) -> Turns:
        world, storage, mine = self.world, self.world.storage, self.num_starts
        if self.looks and not is_restart:
            self.looked_since, before = world.now, storage.status
            while world.now < self.looked_since + WATCHED_S:
                yield WATCH_STEP_S
                if storage.status != before:
                    self.refused = self.stopped = True
                    return
        steps = begin(
            "run", "storage", self.attempt, has_claimed=any(one.attempt == self.attempt for one in storage.claims)
        )
        answer: TermClaim | None = None
        try:
            action = next(steps)
            while True:
                yield world.delay_s()
                if self.is_over(mine):
                    return
                try:
                    answer = self._do(action, is_restart)
                except ElasticRingError as error:
                    action = steps.throw(error)
                else:
                    action = steps.send(answer)
        except StopIteration as done:
            self.own = done.value
            storage.in_journal, storage.journal_of = max(storage.in_journal, done.value.term), self.attempt
        except ElasticRingError:
            self.refused = self.stopped = True
            return
        if not self.running_since:  # no process of this submission has come so far
            self.running_since = world.now
            self.began_with = {one.folder for one in storage.written if not one.is_aside}
            world.run(self, self._tell())
        world.run(self, self._look())
        world.run(self, self._commit())

    def _tell(self) -> Turns:
        while not self.stopped:
            self.world.storage.status = self.attempt, self.world.now + self.ahead_s
            yield STATUS_S

    def _do(self, action: str, is_restart: bool) -> TermClaim | None:
        storage = self.world.storage
        if action == "look":
            self.last_seen = max([*(claim.term for claim in storage.claims), *storage.withdrawn], default=0)
            return storage.newest()
        if action == "claim":
            term = 1 + max(self.last_seen, self.last_read)
            if storage.at(term) != NOBODY:
                return None
            self.own = TermClaim(term, self.attempt, self.attempt, str(self.world.num_turns))
            storage.claims.append(self.own)
            self.world.check_watched(self)
            return self.own
        if action == "withdraw":
            assert self.own is not None
            if storage.at(self.own.term) == self.own:
                storage.withdrawn.add(self.own.term)
            return None
        self.num_reads, self.last_read = self.num_reads + 1, storage.in_journal
        self.read(is_restart)
        return None

    def read(self, is_restart: bool) -> None:
        if is_restart and self.world.storage.journal_of not in ("", self.attempt, self.follows):
            raise RunFailed("the journal is another submission's")
        if self.num_reads == self.refused_at_read:
            raise RunFailed("the run has finished")

    def is_current(self) -> bool:
        """Whether it may go on by what the storage says now; stops it where not."""
        assert self.own is not None
        try:
            storage = self.world.storage
            at_own = storage.at(self.own.term)
            refuse_if_replaced("run", "storage", self.own, storage.newest(), at_own=at_own)
        except ElasticRingError:
            self.stopped = True
        return not self.stopped

    def _look(self) -> Turns:
        mine = self.num_starts
        while not self.is_over(mine):
            yield LOOK_S
            yield self.world.delay_s()
            if not self.is_over(mine):
                self.is_current()

    def _commit(self) -> Turns:
        storage, mine = self.world.storage, self.num_starts
        for number in itertools.count():
            yield COMMIT_S * self.world.random.uniform(0.5, 1.5)
            if self.is_over(mine) or not self.is_current():
                return
            yield self.world.delay_s()  # the manifest is on its way: whatever stops this process now is too late
            if self.is_over(mine):
                return
            assert self.own is not None
            folder = f"{self.attempt}-{self.own.term}-{number}"
            storage.written.append(Written(self.attempt, folder))
            yield self.world.delay_s()
            if self.is_over(mine) or not self.is_current():  # asked before anything is set aside
                return
            for one in storage.written:
                if is_late(self.attempt, one.attempt, one.folder, self.began_with):
                    one.is_aside = True
            self.world.check_counting(self)


class TermWorld:
    """The clock and the storage; deterministic given the seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.storage = TermStorage()
        self.submissions: list[Submission] = []
        self.num_turns = 0
        self.freeze_at: dict[int, tuple[Submission, float]] = {}
        """Before turn N this submission is frozen for so many seconds."""
        self._queue: list[tuple[float, int, Submission | None, Turns]] = []
        self._order = itertools.count()

    def submit(self, attempt: str, **options: Any) -> Submission:
        """`options`: as `Submission`'s."""
        made = Submission(self, attempt, **options)
        self.submissions.append(made)
        made.start(is_restart=False)
        return made

    def delay_s(self) -> float:
        return self.random.uniform(0.001, SLOWEST_S)

    def at(self, delay_s: float, act: Callable[[], object]) -> None:
        def once() -> Turns:
            yield delay_s
            act()

        self.run(None, once())

    def run(self, owner: Submission | None, turns: Turns) -> None:
        """Begin a thread: its first wait begins now."""
        self._go_on(owner, turns)

    def _go_on(self, owner: Submission | None, turns: Turns) -> None:
        wait_s = next(turns, None)
        if wait_s is not None:
            heapq.heappush(self._queue, (self.now + wait_s, next(self._order), owner, turns))

    def run_until(self, until_s: float) -> None:
        while self._queue and self._queue[0][0] <= until_s:
            at_s, _, owner, turns = heapq.heappop(self._queue)
            self._pass(max(at_s, self.now))
            if owner is not None and owner.frozen_until > self.now:
                heapq.heappush(self._queue, (owner.frozen_until, next(self._order), owner, turns))
                continue
            self.num_turns += 1
            if (frozen := self.freeze_at.pop(self.num_turns, None)) is not None:
                frozen[0].frozen_until = max(frozen[0].frozen_until, self.now + frozen[1])
            if owner is None or owner.frozen_until <= self.now:
                self._go_on(owner, turns)
            else:
                heapq.heappush(self._queue, (owner.frozen_until, next(self._order), owner, turns))
        self._pass(until_s)

    def _pass(self, until_s: float) -> None:
        """Time goes by; who is replaced and awake in it must stop soon."""
        newest = self.storage.newest()
        for one in self.submissions:
            begun_s = max(self.now, min(one.frozen_until, until_s))
            replaced = one.own is not None and (
                (newest.term > one.own.term and newest.attempt != one.attempt)
                or self.storage.at(one.own.term) != one.own
            )
            one.awake_s = one.awake_s + until_s - begun_s if replaced and not one.stopped else 0.0
            require(one.awake_s <= BOUND_S, ONE_COMMITS, f"{one.attempt} goes on {one.awake_s:.2f} s after {newest}")
        self.now = until_s

    # ------------------------------------------------------------ the promise

    def check_counting(self, reader: Submission) -> None:
        """What counts, beside what `reader` began with, is its own."""
        others = {
            one.attempt
            for one in self.storage.written
            if not one.is_aside and one.folder not in reader.began_with and one.attempt != reader.attempt
        }
        require(not others, ONE_COMMITS, f"checkpoints of {others} count in {reader.attempt}")

    def check_watched(self, claimer: Submission) -> None:
        """No run is taken over that was awake and wrote its status for all the time in which a driver watched it."""
        for one in self.submissions if claimer.looks and not claimer.running_since else ():
            is_live = one is not claimer and 0.0 < one.running_since <= claimer.looked_since and not one.stopped
            told = f"{claimer.attempt} takes the run of {one.attempt}, which was awake"
            require(not is_live or one.frozen_until > claimer.looked_since, ONE_COMMITS, told)

    def check_end(self) -> None:
        """Exactly one goes on: the owner of the newest claim."""
        running = {one.attempt for one in self.submissions if not one.stopped}
        require(running <= {self.storage.newest().attempt}, ONE_COMMITS, f"{running} go on")


def random_terms(seed: int) -> Counter[str]:
    """Some submissions of one run, frozen, started again, refused and robbed of their claims at random, on hosts whose
    clocks differ; how much of each there was. Raises InvariantBroken."""
    rng = random.Random(f"terms of {seed}")
    world, facts = TermWorld(seed), Counter[str]()

    def submit() -> None:
        refused, looks = rng.choice([0, 0, 0, 0, 1, 2]), rng.random() < 0.8
        world.submit(f"s{len(world.submissions)}", refused_at_read=refused, looks=looks, ahead_s=rng.choice(AHEAD_S))

    def freeze() -> None:
        frozen_s = rng.choice([0.5, 3.0, 20.0])
        world.freeze_at[world.num_turns + rng.randint(1, 20)] = rng.choice(world.submissions), frozen_s

    def restart() -> None:
        one = rng.choice(world.submissions)
        if one.own is not None and not one.stopped:
            one.start(is_restart=True)

    def purge() -> None:
        storage = world.storage
        if rng.random() < 0.7:
            storage.claims.clear()
            storage.withdrawn.clear()
        elif storage.claims:
            storage.claims.remove(rng.choice(storage.claims))

    submit()
    for act, most in ((submit, 3), (freeze, 4), (restart, 3), (purge, 2)):
        number = rng.randint(0, most)
        facts[act.__name__] += number
        for _ in range(number):
            world.at(rng.uniform(0.0, 30.0), act)
    world.run_until(40.0)
    last = world.submit("last")
    world.run_until(150.0)  # nobody is frozen any more
    world.check_end()
    was_stopped = last.own is not None and any(term > last.own.term for term in world.storage.withdrawn)
    is_over = all(one.stopped for one in world.submissions)
    require(not is_over or was_stopped, ONE_COMMITS, "nobody goes on")
    facts["late"] = sum(one.is_aside for one in world.storage.written)
    facts["refused"] = sum(one.refused for one in world.submissions)
    facts["turns"] = world.num_turns
    return facts
