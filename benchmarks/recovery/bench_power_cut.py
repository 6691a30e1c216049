"""How long from a new submission to the next committed step after a power cut: elastic_ring beside Ray Train.

    python benchmarks/recovery/bench_power_cut.py --cuts 5 --save

The model, optimizer and batches of `bench_recovery.py` on four workers, no spare, a checkpoint every 10 steps. Every
process of a run, its driver and its Ray among them, gets SIGKILL at once, at a random moment after a checkpoint; the
same command is started again. The clock begins with that second start, so Python, Ray and the imports are in it:

  next step    to the first committed step beyond all those before the cut
  steps again  committed steps that run again before it: those since the newest checkpoint that counted

All times are on `time.monotonic`, which all processes of a host share. Ray and Ray Train run with their defaults;
`RAY_worker_niceness=0` for both. Steps of elastic_ring that run again have the bits of the first time, which the drill
`python -m deploy.drills power-cut` shows; here nothing is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness import results, runs
from benchmarks.harness.arguments import at_least_one, bench_parser
from benchmarks.peers import common, ray_train_checkpointed
from deploy.drills.processes import MARK, kill_everything
from elastic_ring import CheckpointConfig, ScalingConfig
from elastic_ring.monitor.metrics import JOURNAL_NAME, METRICS_NAME

CHECKPOINT_EVERY, NAME, NEVER = 10, "run", 1_000_000
COMMITTED = "checkpoints/*/*/COMMIT.json"
LIMIT_S, POLL_S, UP_TO_S = 180.0, 0.02, 2.0
SYSTEMS = ("elastic_ring", "ray_train")
Step = tuple[int, float]
"""A step's number and the moment of its commit, on `time.monotonic`."""


def train_ours(folder: Path) -> None:
    trainer = runs.small_trainer(
        folder, NAME, steps=NEVER, scaling=ScalingConfig(runs.DP, runs.CP, spares=0, resources_per_worker={"CPU": 0.25})
    )
    trainer.run_config = replace(
        trainer.run_config, checkpoint_config=CheckpointConfig(every_steps=CHECKPOINT_EVERY, keep_last=2)
    )
    with runs.local_ray():
        trainer.fit()


def train_peer(folder: Path) -> None:
    ray_train_checkpointed.run(folder, NAME, CHECKPOINT_EVERY)


SIDES: dict[str, Callable[[Path], None]] = {"elastic_ring": train_ours, "ray_train": train_peer}


@dataclass
class Run:
    """A run of one system, seen through what it writes."""

    system: str
    folder: Path
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(Path(__file__).resolve()), "--side", self.system, "--folder", str(self.folder)]
        given = {
            **os.environ,
            MARK: self.token,
            "RAY_ADDRESS": "local",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(results.ROOT),
        }
        with Path(self.folder, "log").open("ab") as log:
            return subprocess.Popen(command, env=given, stdout=log, stderr=log)

    def steps(self) -> list[Step]:
        """All commits on record, those of earlier submissions too."""
        if self.system == "ray_train":
            return [(one.step, one.at_s) for one in common.Record(self.folder).events() if one.kind == "step"]
        path = self.folder / NAME / METRICS_NAME
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [(one["step"] + 1, one["committed_monotonic_s"]) for one in found if "committed_monotonic_s" in one]

    def has_checkpoint(self) -> bool:
        """Whether a checkpoint of this run counts."""
        pattern = "checkpoint_manager_snapshot.json" if self.system == "ray_train" else COMMITTED
        return any((self.folder / NAME).glob(pattern))

    def steps_again(self, last: int, after: list[Step]) -> int:
        """How many committed steps the run did again once it was back. Ours are on record once, so they are counted
        from the checkpoint that it resumed from."""
        if self.system == "ray_train":
            return last + 1 - min(step for step, _ in after)
        lines = [json.loads(line) for line in (self.folder / NAME / JOURNAL_NAME).read_text().splitlines()]
        known = [one["event"] for one in lines if one.get("event", {}).get("type") == "CheckpointsKnown"]
        return last - max(found["step"] for found in known[-1]["checkpoints"])

    def until(self, what: str, found: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not found():
            if process.poll() is not None or time.monotonic() > deadline:
                told = Path(self.folder, "log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{self.system}: no {what} within {LIMIT_S:.0f} s; it said:\n{told}")
            time.sleep(POLL_S)


def measure(system: str, num_cuts: int, folder: Path) -> list[dict[str, float]]:
    folder.mkdir()
    run, moments, rows = Run(system, folder), random.Random(0), list[dict[str, float]]()
    process = run.start()
    try:
        for number in range(num_cuts):
            since_s = time.monotonic()
            goal = max([step for step, _ in run.steps()], default=0) + 2 * CHECKPOINT_EVERY
            run.until(f"step {goal}", lambda: any(s >= goal and at > since_s for s, at in run.steps()), process)  # noqa: B023
            run.until("checkpoint", run.has_checkpoint, process)
            time.sleep(moments.uniform(0.0, UP_TO_S))
            num_killed = kill_everything(run.token)
            process.wait()
            before = run.steps()
            last = max(step for step, _ in before)
            submitted_s = time.monotonic()
            process = run.start()
            run.until("next step", lambda: any(s > last and at > submitted_s for s, at in run.steps()), process)  # noqa: B023
            after = [one for one in run.steps() if one[1] > submitted_s]
            rows.append(
                {
                    "cut": number,
                    "killed": num_killed,
                    "next_step_s": round(min(at for step, at in after if step > last) - submitted_s, 3),
                    "steps_again": run.steps_again(last, after),
                    "step_s": step_s(before),
                }
            )
            results.show(f"  {system}: {rows[-1]}")
    finally:
        kill_everything(run.token)
        process.wait()
    return rows


def step_s(steps: list[Step]) -> float:
    """Median of the times from a step's commit to the next's, over the last ones before a cut."""
    ends = [min(at for step, at in steps if step == number) for number in sorted({step for step, _ in steps})[-12:]]
    return round(median(later - earlier for earlier, later in pairwise(ends)), 4)


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--cuts", type=at_least_one, default=5)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        SIDES[args.side](args.folder)
        return
    with runs.scratch() as folder:
        found = {system: measure(system, args.cuts, folder / system) for system in SYSTEMS}
    names = ("next_step_s", "steps_again", "step_s")
    medians = {system: {name: median(row[name] for row in rows) for name in names} for system, rows in found.items()}
    ours = medians["elastic_ring"]["next_step_s"]
    text = results.table(
        ["median", "next step s", "steps again", "step s", "x ours"],
        [[system, *(float(one[name]) for name in names), one["next_step_s"] / ours] for system, one in medians.items()],
    )
    results.show("\n" + text)
    if args.save:
        results.save("checkpoint", "bench_power_cut", text, {"systems": found, "medians": medians})


if __name__ == "__main__":
    main()
