"""Soak: random processes of one run are killed and frozen from outside, a hundred times; nothing may be lost or grow.

    python benchmarks/recovery/chaos.py --kills 100                      tiny model: minutes for ten kills
    python benchmarks/recovery/chaos.py --kills 100 --model laptop       the model of `make train`

On the laptop mesh (2 rings of 2) with two spares. Seeded: which process (a member, two members of different
cp_ranks within a second, a spare, now and then the coordinator), by which signal (SIGKILL, SIGSTOP), how many
steps and which part of a step later. Mostly the next signal waits until all spares are back; one in eight waits
for one spare only. So each signal leaves a spare and a donor, and the table of promises says bit-exact: losses,
samples and weights must be those of a run without faults, made first in the same invocation.

While a spare warms up the steps are paused (the user's loss waits while a file exists), so that the number of
steps does not depend on how fast this machine starts a process. No process gets a signal meanwhile.

Growth: resident memory, descriptors and threads of every process of the run are read whenever all is whole. For each
process that was read often enough, the median of the first third of its readings (after it had lived through WARM
recoveries) is compared with that of the last third. One member never gets a signal, so that one process lives through
all of it; the coordinator gets none in the second half. Bounds: GROWTH below. Actors and placement groups: equal
counts at the start and at the end, none after the run. The corpus is one small package of the standard library, so
that the loader's cache is full before the first reading: it may take `cache_bytes` (128 MiB), and with random order
over a larger corpus it fills for hundreds of steps, which would hide a leak. What still grows by design is the list
of a worker's own records, about 3 KiB a step up to 16,384 of them.

Exits 1 when something was not recovered, differs, or grew.
"""

from __future__ import annotations

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

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from benchmarks.harness import results, runs
from benchmarks.harness.arguments import bench_parser
from benchmarks.harness.paused_loss import PausedLoss
from elastic_ring import ElasticRingTrainer, OptimConfig, RunConfig, ScalingConfig, StepConfig
from elastic_ring.data.source import TextFiles
from elastic_ring.model.config import ModelConfig, preset
from elastic_ring.model.init import Initialiser
from elastic_ring.model.transformer import Transformer
from elastic_ring.runtime.driver.cluster import left_behind

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
    """The signals sent, and the readings of every process."""

    rng: random.Random
    pause: Path
    num_kills: int
    num_injected: int = 0
    num_recoveries: int = 0
    injections: list[dict[str, Any]] = field(default_factory=list)
    processes: dict[int, Process] = field(default_factory=dict)
    first_seen: dict[int, int] = field(default_factory=dict)  # pid -> recoveries before it
    untouched_pid: int = 0
    counts: list[tuple[int, int]] = field(default_factory=list)  # (actors, placement groups)

    # ------------------------------------------------------------ sending signals

    def soak(self, run: runs.Watcher) -> None:
        status = run.whole(SPARES)
        run.more_steps(3)
        self.untouched_pid = status["members"][1]["pid"]
        while self.num_injected < self.num_kills:
            self._inject_once(run, self._pause_until_whole(run))
        self._read_all(run.whole(SPARES))
        results.show(f"  all {self.num_injected} signals sent at step {len(run.steps())}")

    def _inject_once(self, run: runs.Watcher, status: dict[str, Any]) -> None:
        run.more_steps(self.rng.randint(1, MOST_STEPS_BETWEEN))
        time.sleep(self.rng.uniform(0.0, run.steps()[-1]["step_s"]))
        kind = self._kind(status)
        number = signal.SIGSTOP if self.rng.random() < 0.2 else signal.SIGKILL
        begun_s = time.monotonic()
        generation, term = status["generation"], status["term"]
        victims = [psutil.Process(pid) for pid in self._victims(kind, status)]
        for victim in victims:
            runs.inject(victim.pid, number)
            self.num_injected += 1
            if kind == "two members":
                time.sleep(self.rng.choice([0.0, self.rng.uniform(0.0, 1.0)]))
        if kind in ("member", "two members"):
            runs.first_step_of(run, generation, RECOVERED_WITHIN_S)
            self.num_recoveries += 1
        elif kind == "coordinator":
            run.until("a new coordinator", lambda: True if run.status()["term"] > term else None, RECOVERED_WITHIN_S)
            run.more_steps(1)
        took_s = time.monotonic() - begun_s
        if psutil.wait_procs(victims, timeout=RECOVERED_WITHIN_S)[1]:  # a stopped spare must be detected too
            raise runs.WatchFailed(f"{kind} got {number.name} and still runs")
        self.injections.append(
            {"kind": kind, "signal": number.name, "step": len(run.steps()), "back_s": round(took_s, 3)}
        )
        results.show(
            f"  {self.num_injected:3d}/{self.num_kills} {number.name} {kind}: on again after {took_s:.2f} s, "
            f"step {len(run.steps())}"
        )

    def _kind(self, status: dict[str, Any]) -> str:
        kind = self.rng.choices(list(SHARES), list(SHARES.values()))[0]
        scarce = len(status["spares"]) < SPARES
        # A signal must leave a spare for each lost place, and the coordinator's growth is read in the second half.
        late = self.num_injected >= self.num_kills // 2
        if (kind in ("two members", "spare") and scarce) or (kind == "coordinator" and late):
            return "member"
        return "member" if kind == "two members" and self.num_injected + 2 > self.num_kills else kind

    def _victims(self, kind: str, status: dict[str, Any]) -> list[int]:
        if kind == "coordinator":
            return runs.actor_pids("Coordinator")[:1]
        if kind == "spare":
            return [self.rng.choice(status["spares"])["pid"]]
        members = [m for m in status["members"] if m["pid"] != self.untouched_pid]
        first = self.rng.choice(members)
        if kind == "member":
            return [first["pid"]]
        others = [m for m in members if (m["global_rank"] - first["global_rank"]) % runs.CP]
        return [first["pid"], self.rng.choice(others)["pid"]]

    def _pause_until_whole(self, run: runs.Watcher) -> dict[str, Any]:
        """Pause the steps until the spares are back; mostly all of them, sometimes one is enough."""
        enough = 1 if self.rng.random() < 1 / 8 else SPARES
        self.pause.touch()
        try:
            status = run.whole(enough)
            if enough == SPARES:
                self._read_all(status)
            return status
        finally:
            self.pause.unlink()

    # ------------------------------------------------------------ reading

    def _read_all(self, status: dict[str, Any]) -> None:
        named = {p["pid"]: "worker" for p in status["members"] + status["spares"]}
        named |= {pid: "coordinator" for pid in runs.actor_pids("Coordinator")}
        named |= {pid: "agent" for pid in runs.actor_pids("NodeAgent")}
        named[psutil.Process().pid] = "driver"
        for pid, role in named.items():
            process = psutil.Process(pid)
            lived = self.num_recoveries - self.first_seen.setdefault(pid, self.num_recoveries)
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
        role = f"{process.role}{' (never killed)' if pid == soak.untouched_pid else ''}"
        first, last = (
            [median(reading[1 + i] for reading in part) for i in range(len(GROWTH))]
            for part in (warm[:third], warm[-third:])
        )
        rows.append([role, pid, lived, *(f"{a:.1f} -> {b:.1f}" for a, b in zip(first, last, strict=True))])
        missed += [
            f"{role} (pid {pid}): {name} grew from {a:.1f} to {b:.1f}, more than {GROWTH[name]:.0f}, over {lived}"
            for name, a, b in zip(GROWTH, first, last, strict=True)
            if b - a > GROWTH[name]
        ]
    before, after = soak.counts[0], soak.counts[-1]
    text = results.table(["process", "pid", "recoveries", *GROWTH], rows)
    if not rows:
        text = f"no process was read {LEAST_READINGS} times after {WARM} recoveries: growth is not judged"
    text += f"\nactors {before[0]} -> {after[0]}, placement groups {before[1]} -> {after[1]}"
    if before != after:
        missed.append(f"(actors, placement groups) went from {before} to {after}")
    return text, missed


def corpus(context_tokens: int) -> TextFiles:
    """Real text that fits into the loader's cache."""
    return TextFiles(context_tokens, (str(Path(email.__file__).parent / "*.py"),))


def trainer_of(model: str, folder: Path, name: str, steps: int, pause: Path) -> ElasticRingTrainer:
    config, context, batch = (
        (ModelConfig(257, 2, 32, 4, 2, 8, 64), 96, 6) if model == "tiny" else (preset("laptop"), 2048, 4)
    )
    return ElasticRingTrainer(
        partial(Transformer, config),
        corpus(context),
        loss=PausedLoss(str(pause)),
        step_config=StepConfig(steps=steps, global_batch=batch, context_tokens=context),
        optim_config=OptimConfig(peak_lr=3e-3, min_lr=3e-4, warmup_steps=min(10, steps), total_steps=steps),
        scaling_config=ScalingConfig(dp=runs.DP, cp=runs.CP, spares=SPARES, resources_per_worker={"CPU": 0.25}),
        run_config=RunConfig(name, run_dir=str(folder / name), progress=False),
        initial=Initialiser(0, config.num_layers),
    )


def compare(calm: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What differs from the run without faults. Where a recovery was only sample-exact, samples and losses."""
    missed = [f"{r['cause']}: {r['steps_undone']} steps undone" for r in found["recoveries"] if r["steps_undone"]]
    if calm["samples_sha256"] != found["samples_sha256"]:
        missed.append("other samples were consumed than in the run without faults")
    not_exact = [r["cause"] for r in found["recoveries"] if not r["exact"]]
    missed += [f"promised sample-exact only: {cause}" for cause in not_exact]
    if not not_exact:
        missed += [
            f"{key} differ from the run without faults"
            for key in ("losses", "weights_sha256")
            if calm[key] != found[key]
        ]
    return missed


def outliving(pids: list[int]) -> list[int]:
    """Which of these processes still run after Ray had the time to end them."""
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return [process.pid for process in psutil.wait_procs(processes, timeout=ENDED_WITHIN_S)[1]]


def run_all(model: str, num_kills: int, seed: int) -> tuple[str, list[str], dict[str, Any]]:
    steps = STEPS_PER_KILL * num_kills + STEPS_MORE
    with runs.scratch() as folder, runs.local_ray():
        pause = folder / "pause"
        results.show(f"{steps} steps without faults")
        began_s = time.monotonic()
        nothing: Callable[[runs.Watcher], None] = lambda run: None  # noqa: E731
        trainer = trainer_of(model, folder, "calm", steps, pause)
        runs.train_while(trainer, nothing, to_the_end=True)
        calm = runs.summary_of(trainer)
        results.show(
            f"{steps} steps with {num_kills} kills, seed {seed}; without them it took "
            f"{time.monotonic() - began_s:.0f} s"
        )
        soak = Soak(random.Random(seed), pause, num_kills)
        trainer = trainer_of(model, folder, RUN, steps, pause)
        runs.train_while(trainer, soak.soak, to_the_end=True)
        found = runs.summary_of(trainer)
        left = left_behind(RUN)
        alive = outliving([pid for pid, process in soak.processes.items() if process.role != "driver"])
    text, missed = growth(soak)
    missed += compare(calm, found)
    missed += [f"left behind: {name}" for name in left] + [f"pid {pid} outlived the run" for pid in alive]
    text += (
        f"\n{soak.num_injected} signals, {len(found['recoveries'])} recoveries, {len(found['generations'])}"
        f" generations, all exact: {found['exact']}, goodput {found['goodput']:.0%}"
        f"\nweights {found['weights_sha256'][:16]}, without faults {calm['weights_sha256'][:16]}; after the run"
        f" {len(left)} actors or placement groups"
    )
    readings = {f"{process.role} {pid}": process.readings for pid, process in soak.processes.items()}
    figures = {"injections": soak.injections, "recoveries": found["recoveries"], "seed": seed, "model": model}
    return text, missed, {**figures, "readings": readings}


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", choices=["tiny", "laptop"], default="tiny")
    parser.add_argument(
        "--save", action="store_true", help="write the tables and a JSON into benchmarks/results/recovery/"
    )
    arguments = parser.parse_args()
    text, missed, figures = run_all(arguments.model, arguments.kills, arguments.seed)
    text += "\n" + results.verdict(missed, "all recovered, exact, and nothing grew")
    results.show("\n" + text)
    if arguments.save:
        results.save("recovery", "chaos", text, {**figures, "missed": missed})
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
