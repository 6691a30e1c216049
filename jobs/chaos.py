"""Soak: random processes of one run are killed and frozen from outside, a hundred times; nothing may be lost or grow.

    python jobs/chaos.py --kills 100                      tiny model: minutes for ten kills
    python jobs/chaos.py --kills 100 --model laptop       the model of `make train`

On the laptop mesh (2 rings of 2) with two spares. Seeded: which process (a member, two members of different
cp_ranks within a second, a spare, now and then the coordinator), by which signal (SIGKILL, SIGSTOP), how many
steps and which part of a step later. Mostly the next strike waits until all spares are back; one in eight waits
for one spare only. So each strike leaves a spare and a donor, and the table of promises says bit-exact: losses,
samples and weights must be those of a run without faults, made first in the same invocation.

While a spare warms up the steps are held (the user's loss waits for a file to go away), so that the number of
steps does not depend on how fast this machine starts a process. No process is struck while they are held.

Growth: resident memory, descriptors and threads of every process of the run are read whenever all is whole. For each
process that was read often enough, the median of the first third of its readings (after it had lived through WARM
recoveries) is compared with that of the last third. One member is never struck, so that one process lives through all
of it; the coordinator is not struck in the second half. Bounds: GROWTH below. Actors and placement groups: equal
counts at the start and at the end, none after the run. The corpus is one small package of the standard library, so
that the loader's cache is full before the first reading: it may take `cache_bytes` (128 MiB), and with random order
over a larger corpus it fills for hundreds of steps, which would hide a leak. What still grows by design is the list
of a worker's own records, about 3 KiB a step up to 16,384 of them.

Exits 1 when something was not recovered, differs, or grew.
"""

from __future__ import annotations

import argparse
import email
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":  # run from a checkout, where jobs is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from elastic_ring import ElasticRingTrainer, OptimConfig, RunConfig, ScalingConfig, StepConfig
from elastic_ring.data.source import TextFiles
from elastic_ring.model.config import ModelConfig, preset
from elastic_ring.model.init import Initialiser
from elastic_ring.model.transformer import Transformer
from elastic_ring.runtime.cluster import left_behind
from jobs import drills
from jobs.held import HeldLoss

SPARES = 2
STEPS_PER_KILL, STEPS_MORE = 15, 100
MOST_STEPS_BETWEEN = 12
WARM = 3
LEAST_READINGS = 9
GROWTH = {"rss_mib": 8.0, "fds": 1.0, "threads": 1.0}
RECOVERED_WITHIN_S = 120.0
ENDED_WITHIN_S = 10.0
RUN = "chaos"
SHARES = {"member": 70, "two members": 10, "spare": 12, "coordinator": 8}


@dataclass
class Process:
    """Readings of one process while all was whole: (recoveries it has lived through, rss_mib, fds, threads)."""

    role: str
    readings: list[tuple[int, float, float, float]] = field(default_factory=list)


@dataclass
class Soak:
    """What the striking hand did and saw."""

    rng: random.Random
    hold: Path
    num_kills: int
    num_struck: int = 0
    num_recoveries: int = 0
    strikes: list[dict[str, Any]] = field(default_factory=list)
    processes: dict[int, Process] = field(default_factory=dict)
    born: dict[int, int] = field(default_factory=dict)  # pid -> recoveries before it was first seen
    untouched_pid: int = 0
    counts: list[tuple[int, int]] = field(default_factory=list)  # (actors, placement groups)

    # ------------------------------------------------------------ striking

    def soak(self, run: drills.Watcher) -> None:
        status = run.whole(SPARES)
        run.more_steps(3)
        self.untouched_pid = status["members"][1]["pid"]
        while self.num_struck < self.num_kills:
            self._strike_once(run, self._hold_until_whole(run))
        self._read_all(run.whole(SPARES))
        drills.show(f"  all {self.num_struck} strikes done at step {len(run.steps())}")

    def _strike_once(self, run: drills.Watcher, status: dict[str, Any]) -> None:
        run.more_steps(self.rng.randint(1, MOST_STEPS_BETWEEN))
        time.sleep(self.rng.uniform(0.0, run.steps()[-1]["step_s"]))
        kind = self._kind(status)
        number = signal.SIGSTOP if self.rng.random() < 0.2 else signal.SIGKILL
        begun_s = time.monotonic()
        generation, term = status["generation"], status["term"]
        victims = [psutil.Process(pid) for pid in self._victims(kind, status)]
        for victim in victims:
            drills.strike(victim.pid, number)
            self.num_struck += 1
            if kind == "two members":
                time.sleep(self.rng.choice([0.0, self.rng.uniform(0.0, 1.0)]))
        if kind in ("member", "two members"):
            run.first_step_of(generation, RECOVERED_WITHIN_S)
            self.num_recoveries += 1
        elif kind == "coordinator":
            run.until("a new coordinator", lambda: True if run.status()["term"] > term else None, RECOVERED_WITHIN_S)
            run.more_steps(1)
        took_s = time.monotonic() - begun_s
        if psutil.wait_procs(victims, timeout=RECOVERED_WITHIN_S)[1]:  # a stopped spare must be found out too
            raise drills.DrillFailed(f"{kind} was struck by {number.name} and still lives")
        self.strikes.append({"kind": kind, "signal": number.name, "step": len(run.steps()), "back_s": round(took_s, 3)})
        drills.show(f"  {self.num_struck:3d}/{self.num_kills} {number.name} {kind}: on again after {took_s:.2f} s, "
                    f"step {len(run.steps())}")  # fmt: skip

    def _kind(self, status: dict[str, Any]) -> str:
        kind = self.rng.choices(list(SHARES), list(SHARES.values()))[0]
        scarce = len(status["spares"]) < SPARES
        # A strike must leave a spare for each lost place, and the coordinator's growth is read in the second half.
        late = self.num_struck >= self.num_kills // 2
        if (kind in ("two members", "spare") and scarce) or (kind == "coordinator" and late):
            return "member"
        return "member" if kind == "two members" and self.num_struck + 2 > self.num_kills else kind

    def _victims(self, kind: str, status: dict[str, Any]) -> list[int]:
        if kind == "coordinator":
            return drills.actor_pids("Coordinator")[:1]
        if kind == "spare":
            return [self.rng.choice(status["spares"])["pid"]]
        members = [m for m in status["members"] if m["pid"] != self.untouched_pid]
        first = self.rng.choice(members)
        if kind == "member":
            return [first["pid"]]
        others = [m for m in members if (m["global_rank"] - first["global_rank"]) % drills.CP]
        return [first["pid"], self.rng.choice(others)["pid"]]

    def _hold_until_whole(self, run: drills.Watcher) -> dict[str, Any]:
        """Hold the steps until the spares are back; mostly all of them, sometimes one is enough."""
        enough = 1 if self.rng.random() < 1 / 8 else SPARES
        self.hold.touch()
        try:
            status = run.whole(enough)
            if enough == SPARES:
                self._read_all(status)
            return status
        finally:
            self.hold.unlink()

    # ------------------------------------------------------------ reading

    def _read_all(self, status: dict[str, Any]) -> None:
        named = {p["pid"]: "worker" for p in status["members"] + status["spares"]}
        named |= {pid: "coordinator" for pid in drills.actor_pids("Coordinator")}
        named |= {pid: "agent" for pid in drills.actor_pids("NodeAgent")}
        named[psutil.Process().pid] = "driver"
        for pid, role in named.items():
            process = psutil.Process(pid)
            lived = self.num_recoveries - self.born.setdefault(pid, self.num_recoveries)
            reading = (lived, process.memory_info().rss / 2**20, float(process.num_fds()), float(process.num_threads()))
            self.processes.setdefault(pid, Process(role)).readings.append(reading)
        names = left_behind(RUN)
        num_groups = sum(name.startswith("placement group") for name in names)
        self.counts.append((len(names) - num_groups, num_groups))


def growth(soak: Soak) -> tuple[str, list[str]]:
    """The table of processes that were read often enough, early and late, and what grew beyond its bound."""
    rows, missed = [], []
    for pid, process in soak.processes.items():
        warm = [reading for reading in process.readings if reading[0] >= WARM]
        if len(warm) < LEAST_READINGS:
            continue
        third, lived = len(warm) // 3, warm[-1][0] - warm[0][0]
        role = f"{process.role}{' (never struck)' if pid == soak.untouched_pid else ''}"
        first, last = (
            [median(reading[1 + i] for reading in part) for i in range(len(GROWTH))]
            for part in (warm[:third], warm[-third:])
        )
        rows.append([role, pid, lived, *(f"{a:.1f} -> {b:.1f}" for a, b in zip(first, last, strict=True))])
        missed += [
            f"{role} (pid {pid}): {name} grew from {a:.1f} to {b:.1f}, more than {GROWTH[name]:.0f}, over {lived}"
            for name, a, b in zip(GROWTH, first, last, strict=True) if b - a > GROWTH[name]
        ]  # fmt: skip
    before, after = soak.counts[0], soak.counts[-1]
    text = drills.table(["process", "pid", "recoveries", *GROWTH], rows)
    if not rows:
        text = f"no process was read {LEAST_READINGS} times after {WARM} recoveries: growth is not judged"
    text += f"\nactors {before[0]} -> {after[0]}, placement groups {before[1]} -> {after[1]}"
    if before != after:
        missed.append(f"(actors, placement groups) went from {before} to {after}")
    return text, missed


def corpus(context_tokens: int) -> TextFiles:
    """Real text that fits into the loader's cache at once."""
    return TextFiles(context_tokens, (str(Path(email.__file__).parent / "*.py"),))


def trainer_of(model: str, folder: Path, name: str, steps: int, hold: Path) -> ElasticRingTrainer:
    config, context, batch = (
        (ModelConfig(257, 2, 32, 4, 2, 8, 64), 96, 6) if model == "tiny" else (preset("laptop"), 2048, 4)
    )
    return ElasticRingTrainer(
        partial(Transformer, config), corpus(context), loss=HeldLoss(str(hold)),
        step=StepConfig(steps=steps, global_batch=batch, context_tokens=context),
        optim=OptimConfig(peak_lr=3e-3, min_lr=3e-4, warmup_steps=min(10, steps), total_steps=steps),
        scaling=ScalingConfig(dp=drills.DP, cp=drills.CP, spares=SPARES, resources_per_worker={"CPU": 0.25}),
        run=RunConfig(name, str(folder / name), progress=False), initial=Initialiser(0, config.num_layers),
    )  # fmt: skip


def compare(calm: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What differs from the run without faults. Where a recovery was only sample-exact, samples and losses."""
    missed = [f"{r['cause']}: {r['steps_undone']} steps undone" for r in found["recoveries"] if r["steps_undone"]]
    if calm["samples_sha256"] != found["samples_sha256"]:
        missed.append("other samples were consumed than in the run without faults")
    not_exact = [r["cause"] for r in found["recoveries"] if not r["exact"]]
    missed += [f"promised sample-exact only: {cause}" for cause in not_exact]
    if not not_exact:
        missed += [f"{key} differ from the run without faults" for key in ("losses", "weights_sha256")
                   if calm[key] != found[key]]  # fmt: skip
    return missed


def outliving(pids: list[int]) -> list[int]:
    """Which of these are still there when Ray has had the time to end what it was told to."""
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return [process.pid for process in psutil.wait_procs(processes, timeout=ENDED_WITHIN_S)[1]]


def run_all(model: str, num_kills: int, seed: int) -> tuple[str, list[str], dict[str, Any]]:
    steps = STEPS_PER_KILL * num_kills + STEPS_MORE
    with drills.scratch() as folder, drills.local_ray():
        hold = folder / "hold"
        drills.show(f"{steps} steps without faults")
        began_s = time.monotonic()
        nothing: Callable[[drills.Watcher], None] = lambda run: None  # noqa: E731
        trainer = trainer_of(model, folder, "calm", steps, hold)
        drills.train_while(trainer, nothing, to_the_end=True)
        calm = drills.summary_of(trainer)
        drills.show(f"{steps} steps with {num_kills} kills, seed {seed}; without them it took "
                    f"{time.monotonic() - began_s:.0f} s")  # fmt: skip
        soak = Soak(random.Random(seed), hold, num_kills)
        trainer = trainer_of(model, folder, RUN, steps, hold)
        drills.train_while(trainer, soak.soak, to_the_end=True)
        found = drills.summary_of(trainer)
        left = left_behind(RUN)
        alive = outliving([pid for pid, process in soak.processes.items() if process.role != "driver"])
    text, missed = growth(soak)
    missed += compare(calm, found)
    missed += [f"left behind: {name}" for name in left] + [f"pid {pid} outlived the run" for pid in alive]
    text += (
        f"\n{soak.num_struck} strikes, {len(found['recoveries'])} recoveries, {len(found['generations'])} generations, "
        f"all exact: {found['exact']}, goodput {found['goodput']:.0%}\nweights {found['weights_sha256'][:16]}, without "
        f"faults {calm['weights_sha256'][:16]}; after the run {len(left)} actors or placement groups"
    )
    readings = {f"{process.role} {pid}": process.readings for pid, process in soak.processes.items()}
    figures = {"strikes": soak.strikes, "recoveries": found["recoveries"], "seed": seed, "model": model}
    return text, missed, {**figures, "readings": readings}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", choices=["tiny", "laptop"], default="tiny")
    parser.add_argument("--save", action="store_true", help="write the tables and a JSON into benchmarks/")
    arguments = parser.parse_args()
    text, missed, figures = run_all(arguments.model, arguments.kills, arguments.seed)
    text += "\n" + ("\n".join(f"MISSED: {line}" for line in missed) or "all recovered, exact, and nothing grew")
    drills.show("\n" + text)
    if arguments.save:
        drills.save("chaos", text, {**figures, "missed": missed})
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
