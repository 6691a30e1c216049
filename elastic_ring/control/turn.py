"""One call of `advance` while it is being worked out: the state so far, the commands, the reasons.

The only mutable thing in the control core; it never outlives the call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from elastic_ring.control.messages import Command, EndRun, Event, KillWorker, Release, Stop
from elastic_ring.control.options import ControlOptions
from elastic_ring.control.state import Counted, Ended, Phase, State, Worker, crew_of


class Turn:
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
        self.state = replace(self.state, **changes)

    def enter(self, phase: Phase) -> None:
        self.state = replace(self.state, phase=phase)

    def edit_phase(self, **changes: Any) -> None:
        self.state = replace(self.state, phase=replace(self.state.phase, **changes))

    def commit(self, num_steps: int) -> None:
        """So many steps are committed, if that is news; what the user's code raised in them is behind the run."""
        if num_steps > self.state.committed:
            errors = self.state.user_errors
            self.set(committed=num_steps, user_errors=errors if errors.step >= num_steps else Counted())

    def say(self, reason: str) -> None:
        self.reasons.append(reason)

    def send(self, command: Command) -> None:
        self.commands.append(command)

    # ------------------------------------------------------------ workers

    def put(self, worker: Worker) -> None:
        self.set(workers={**self.state.workers, worker.worker: worker})

    def live(self, workers: Iterable[str]) -> list[str]:
        """Those that are ready: neither gone, nor starting, nor told to go."""
        known = self.state.workers
        return [name for name in workers if name in known and known[name].life == "ready"]

    def pending_deaths(self, workers: Iterable[str]) -> list[str]:
        """Those that were told to go and are still waited for."""
        known = self.state.workers
        return [
            name for name in workers
            if name in known and known[name].life == "dying" and not known[name].written_off
        ]

    def fence(self, names: Iterable[str], why: str, written_off: bool = False) -> None:
        """Kill; the slot stays taken until the death is confirmed. `written_off`: and nobody waits for it."""
        workers = dict(self.state.workers)
        for name in names:
            self.send(KillWorker(self.cause, name, why, self.state.term))
            workers[name] = replace(
                workers[name], life="dying", deadline=self.now + self.options.report_s, written_off=written_off
            )
        self.set(workers=workers)

    def release(self, names: Iterable[str]) -> None:
        """Let go in peace: nobody waits for it, and it is killed if it stays."""
        workers = dict(self.state.workers)
        for name in names:
            self.send(Release(self.cause, name, self.state.term))
            workers[name] = replace(
                workers[name], life="dying", deadline=self.now + self.options.report_s, written_off=True
            )
        self.set(workers=workers, pool_changed_at=self.now)

    def stop(self, names: Iterable[str], mode: str) -> None:
        for name in names:
            self.send(Stop(self.cause, name, self.state.term, self.state.generation, mode))

    # ------------------------------------------------------------ the end

    def end(self, error: str, message: str, **facts: object) -> None:
        """Everyone is let go and the run is over; `error` is a class name of `elastic_ring.errors`, or empty."""
        crew = crew_of(self.state)
        told: dict[str, object] = {"committed_steps": self.state.committed, "generation": self.state.generation}
        if crew is not None:
            told["mesh"] = str(crew.mesh)
        pairs = tuple((name, str(value)) for name, value in {**told, **facts}.items())
        starting = [name for name, worker in self.state.workers.items() if worker.life == "starting"]
        self.release(self.live(self.state.workers))
        self.fence(starting, "the run is over", written_off=True)
        end = EndRun(self.cause, error, message, pairs, self.state.term)
        self.send(end)
        self.enter(Ended(end))
        self.say(f"run ended: {error or 'success'}: {message.splitlines()[0] if message else ''}")
