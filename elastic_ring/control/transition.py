"""The context of one `advance` call: the state so far, the commands and the reasons.

The only mutable object in the control core; it must not outlive the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from elastic_ring.control.messages import Command, EndRun, Event, KillWorker, Release, Stop
from elastic_ring.control.options import ControlOptions
from elastic_ring.control.pool import Node, Pool, Worker, with_changes
from elastic_ring.control.state import Counted, Ended, Phase, State, membership_of


class Transition:
    def __init__(self, state: State, event: Event, now: float) -> None:
        self.state = state
        self.now = now
        self.cause = event.cause
        self.commands: list[Command] = []
        self.reasons: list[str] = []

    @property
    def options(self) -> ControlOptions:
        return self.state.options

    @property
    def phase(self) -> Phase:
        return self.state.phase

    def set(self, **changes: Any) -> None:
        self.state = with_changes(self.state, **changes)

    def enter(self, phase: Phase) -> None:
        self.state = with_changes(self.state, phase=phase)

    def edit_phase(self, **changes: Any) -> None:
        self.enter(with_changes(self.state.phase, **changes))

    def commit(self, num_steps: int) -> None:
        """Record `num_steps` steps as committed if that is more than before; forget user errors in these steps."""
        if num_steps > self.state.committed:
            errors = self.state.user_errors
            self.set(
                committed=num_steps,
                committed_at=self.now,
                reached=max(self.state.reached, num_steps),
                user_errors=errors if errors.step >= num_steps else Counted(),
            )

    def explain(self, reason: str) -> None:
        self.reasons.append(reason)

    def send(self, command: Command) -> None:
        self.commands.append(command)

    # ------------------------------------------------------------ workers

    def put(self, *workers: Worker) -> None:
        self._set_pool(self.state.pool.having(workers))

    def remove(self, names: Iterable[str]) -> None:
        self._set_pool(self.state.pool.without(names))

    def put_nodes(self, nodes: Mapping[str, Node]) -> None:
        self._set_pool(self.state.pool.having_nodes(nodes))

    def remove_node(self, name: str) -> None:
        self._set_pool(self.state.pool.without_node(name))

    def _set_pool(self, pool: Pool) -> None:
        self.set(pool=pool, workers=pool.workers, nodes=pool.nodes)

    def ready_among(self, workers: Iterable[str]) -> list[str]:
        pool = self.state.workers
        return [name for name in workers if name in pool and pool[name].status == "ready"]

    def kill(self, names: Iterable[str], why: str, written_off: bool = False) -> None:
        """Kill workers. Their slots stay in use until the death is confirmed; `written_off`: do not wait for it."""
        names = tuple(names)
        for name in names:
            self.send(KillWorker(self.cause, name, why, self.state.term))
        self._let_stop(names, written_off)

    def release(self, names: Iterable[str]) -> None:
        """Let workers exit cleanly. No recovery waits for them; they are killed after `report_s`."""
        names = tuple(names)
        for name in names:
            self.send(Release(self.cause, name, self.state.term))
        self._let_stop(names, written_off=True)
        self.set(pool_changed_at=self.now)

    def _let_stop(self, names: tuple[str, ...], written_off: bool) -> None:
        pool, deadline = self.state.workers, self.now + self.options.timeouts.report_s
        self.put(
            *(replace(pool[name], status="stopping", deadline=deadline, written_off=written_off) for name in names)
        )

    def stop(self, names: Iterable[str], mode: str) -> None:
        for name in names:
            self.send(Stop(self.cause, name, self.state.term, self.state.generation, mode))

    # ------------------------------------------------------------ the end

    def end(self, error: str, message: str, **facts: object) -> None:
        """End the run and release all workers. `error`: a class name of `elastic_ring.errors`, or empty."""
        membership = membership_of(self.state)
        mesh = {} if membership is None else {"mesh": membership.mesh}
        progress = {"committed_steps": self.state.committed, "generation": self.state.generation, **mesh}
        pairs = tuple((name, str(value)) for name, value in {**progress, **facts}.items())
        starting = [name for name, worker in self.state.workers.items() if worker.status == "starting"]
        self.release(self.ready_among(self.state.workers))
        self.kill(starting, "the run is over", written_off=True)
        end = EndRun(self.cause, error, message, pairs, self.state.term)
        self.send(end)
        self.enter(Ended(end))
        self.explain(f"run ended: {error or 'success'}: {message.splitlines()[0] if message else ''}")
