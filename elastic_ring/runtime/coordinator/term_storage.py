"""The storage of a run as its coordinator writes it under its term, and the deciding thread's wait for it: a full or
read-only disk, a mount that is away.

No command may leave before its journal line is on disk, so the thread can decide nothing meanwhile. The wait is no
hang: beats are answered for the thread, its clock stands still, so that no deadline passes, and drivers get a message.
Training goes on. No decisions here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from elastic_ring.config import RunConfig
from elastic_ring.control.decisions.terms import TermClaim
from elastic_ring.monitor.journal import Journal
from elastic_ring.monitor.metrics import JOURNAL_NAME
from elastic_ring.runtime.coordinator.checkpoints import CheckpointKeeper, Writer
from elastic_ring.runtime.coordinator.inbox import Put
from elastic_ring.runtime.coordinator.run_spec import Clock, RunSpec, checkpoint_facts
from elastic_ring.runtime.run_storage import Mirror
from elastic_ring.runtime.terms import Terms, TermWatch
from elastic_ring.state.storage.backend import Retries, ignore

T = TypeVar("T")

HELD_S = 0.1
"""A shorter wait is an ordinary write."""


class StorageWait:
    """Tries a write of the deciding thread again; called as `Retries`."""

    def __init__(self, run: RunConfig, clock: Clock) -> None:
        self._limit_s = run.checkpoint_config.fail_after_s
        self._clock = clock
        self._since_s: float | None = None
        self._gives_up = threading.Event()
        self.tell: Callable[[str], None] = ignore
        self.stands_since = ""
        """Why training stands until the thread has decided; empty while it goes on."""

    @property
    def is_waiting(self) -> bool:
        """Whether the deciding thread is in a write, for no longer than `fail_after_s`. For any thread."""
        since_s = self._since_s
        return since_s is not None and time.monotonic() - since_s <= self._limit_s

    def give_up(self) -> None:
        """The run is to end: the next attempt is the last."""
        self._gives_up.set()

    def meanwhile(self) -> str:
        """What training does while no decision can be journalled."""
        until = f"until it can be written, for at most {self._limit_s:g} s (checkpoint.fail_after_s)"
        return f"training stands {until}: {self.stands_since}" if self.stands_since else "training goes on"

    def loses(self, member: str) -> None:
        """A member was lost. Called by other threads: while this one waits, no decision follows."""
        if self.is_waiting and not self.stands_since:
            self.stands_since = f"{member} was lost"
            self.tell(f"the run's folder cannot be written; {self.meanwhile()}")

    @contextmanager
    def declared(self) -> Iterator[None]:
        """Around anything that may hang in the folder's file system."""
        begun_s = self._since_s = time.monotonic()
        try:
            yield
        finally:
            self._since_s = None
            waited_s = time.monotonic() - begun_s
            if waited_s > HELD_S:
                self._clock.hold(waited_s)

    def __call__(
        self,
        attempt: Callable[[], T],
        is_final: Callable[[Exception], bool],
        before_next: Callable[[Exception], None] = lambda error: None,
    ) -> T:
        """As `Retries`."""
        with self.declared():
            retries = Retries(self._limit_s, lambda text: self.tell(f"the run's folder {text}; {self.meanwhile()}"))
            return retries(attempt, lambda error: self._gives_up.is_set() or is_final(error), before_next)


@dataclass(frozen=True)
class TermStorage:
    """What a coordinator writes under its term, and the watch for a newer one."""

    journal: Journal
    watch: TermWatch
    mirror: Mirror
    checkpoints: CheckpointKeeper

    @classmethod
    def of(
        cls,
        run_spec: RunSpec,
        claim: TermClaim,
        terms: Terms,
        wait: StorageWait,
        put: Put,
        author: Callable[[Writer], Writer] = lambda writer: writer,
    ) -> TermStorage:
        """Opens the journal. `author` completes what the manifests of checkpoints get."""
        run = run_spec.run
        journal = Journal(run.folder / JOURNAL_NAME, durable=True, retries=wait).open()
        watch = TermWatch(run, claim, terms)
        mirror = Mirror(run, claim.term, watch.look)
        facts = checkpoint_facts(run_spec)
        writer = Writer(claim.term, run_spec.identity.digest, facts, run_spec.attempt, recorded=mirror.flush)
        return cls(journal, watch, mirror, CheckpointKeeper(run, run_spec.resume, author(writer), put, watch.look))

    def abandon(self) -> None:
        """The run is another submission's: write nothing more."""
        self.checkpoints.abandon()
        self.mirror.abandon()
