"""How long from SIGKILL to the next committed step: elastic_ring, Ray Train's restart, its replica groups.

    python benchmarks/recovery/bench_recovery.py --kills 5 --save

One go on one machine, the same small model (`benchmarks/peers/common.py`), one of four workers killed from outside
by its PID, each time once everything is whole again. Every system runs in a process and a Ray of its own.

  elastic_ring     2 rings of 2, one spare; the victim's rank rotates; its successor is the warm spare
  restart          Ray Train starts all four again; the victim is rank 3
  replica          Ray Train with torchft, a step needs all four workers, the settings of Ray's own example
  replica-kindest  the same, but steps may commit without the dead worker's samples, and it counts as dead after
                   1 s: less is done before "the next step" than in the others, so its time is a lower bound

"next step" is the first commit of a step beyond all those before the kill, on `time.monotonic`, which all
processes of a host share. For elastic_ring it is the first step of the new generation, in the record of the
rank that published it; the phases are from the run's journal: detect (SIGKILL to the first event that says
so), close (to all resumed, less heal), heal, rerun (to the commit).

Exits 1 where a bound is missed: ours at most 0.6 s, 15 times faster than restart, 4 times faster than replica,
and steps of at most 0.1 s.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

if __name__ in ("__main__", "__mp_main__"):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness import results, runs
from benchmarks.harness.arguments import bench_parser
from benchmarks.peers import common, ray_train_replica, ray_train_restart

Rows = list[dict[str, float]]
NEVER = 1_000_000
LIMIT_S, STEP_LIMIT_S = 0.6, 0.1
LEAST_RATIO = {"restart": 15.0, "replica": 4.0}
OURS = "elastic_ring"


def measure_ours(num_kills: int) -> Rows:
    """Train, kill rank 0, 1, 2, 3, 0, ... from outside; the phases of each recovery."""
    with runs.scratch() as folder, runs.local_ray():
        trainer = runs.small_trainer(folder, "bench-recovery", steps=NEVER)
        return runs.train_while(trainer, lambda run: [kill_once(run, number) for number in range(num_kills)])


def kill_once(run: runs.Watcher, number: int) -> dict[str, float]:
    run.whole(1)
    run.more_steps(common.STEPS_BETWEEN_KILLS)
    time.sleep(random.Random(number).uniform(0.0, 1.0))  # any moment of a step
    status = run.whole(1)
    rank = number % common.NUM_WORKERS
    pid = next(member["pid"] for member in status["members"] if member["global_rank"] == rank)
    injected_s = runs.inject(pid, signal.SIGKILL)
    step = runs.first_step_of(run, status["generation"])
    recovery = run.until("its record", lambda: run.recoveries()[number] if len(run.recoveries()) > number else None)
    before = [line for line in run.steps() if line["generation"] == status["generation"]]
    phases = _phases(run, injected_s, step, recovery["heal_s"])
    row = {
        "kill": number,
        "rank": rank,
        **phases,
        "next_step_s": step["committed_monotonic_s"] - injected_s,
        "steps_undone": recovery["steps_undone"],
        "step_s": _step_s(before, injected_s),
    }
    results.show(f"  {OURS}: rank {rank} killed, next step after {row['next_step_s']:.3f} s")
    return {name: round(value, 4) for name, value in row.items()}


def _phases(run: runs.Watcher, injected_s: float, step: dict[str, Any], heal_s: float) -> dict[str, float]:
    """Durations between moments on this host's monotonic clock, which the coordinator's journal and rank 0 have too."""
    ahead_s, generation = run.ahead_s(), step["generation"]
    losses_s = [line["now"] - ahead_s for line in run.events("WorkerLost", "MemberFailed")]
    noticed_s = min(lost_s for lost_s in losses_s if lost_s > injected_s)
    resumed = [line["now"] for line in run.events("Resumed") if line["event"]["generation"] == generation]
    resumed_s = max(resumed) - ahead_s
    return {
        "detect_s": noticed_s - injected_s,
        "close_s": resumed_s - noticed_s - heal_s,
        "heal_s": heal_s,
        "rerun_s": step["committed_monotonic_s"] - resumed_s,
    }


def _step_s(lines: list[dict[str, Any]], before_s: float) -> float:
    ends_s = [line["committed_monotonic_s"] for line in lines if line["committed_monotonic_s"] < before_s]
    ends_s = ends_s[-common.STEPS_BETWEEN_KILLS - 1 :]
    return median(later - earlier for earlier, later in pairwise(ends_s))


def measure_restart(num_kills: int) -> Rows:
    return ray_train_restart.measure(num_kills)


def measure_replica(num_kills: int) -> Rows:
    return ray_train_replica.measure(num_kills)


def measure_replica_kindest(num_kills: int) -> Rows:
    return ray_train_replica.measure(num_kills, common.NUM_WORKERS - 1, ray_train_replica.SHORT_HEARTBEAT)


SYSTEMS: dict[str, Callable[[int], Rows]] = {
    OURS: measure_ours,
    "restart": measure_restart,
    "replica": measure_replica,
    "replica-kindest": measure_replica_kindest,
}


def apart(system: str, num_kills: int) -> Rows:
    """One system's rows, measured in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(SYSTEMS[system], num_kills).result()


def report(found: dict[str, Rows], skipped: dict[str, str]) -> tuple[str, list[str]]:
    """The tables, and the bounds that were missed."""
    parts = []
    for system, rows in found.items():
        names = list(dict.fromkeys(name for row in rows for name in row))
        parts.append(f"{system}, every kill:\n" + results.table(names, [[row.get(n) for n in names] for row in rows]))
    medians = {system: common.report(system, rows)["medians"] for system, rows in found.items()}
    ours = medians.get(OURS, {}).get("next_step_s")
    head = ["median", "next step s", "complete s", "step s", "x ours"]
    lines, missed = [], []
    for system, m in medians.items():
        ratio = m["next_step_s"] / ours if ours else None
        lines.append([system, m["next_step_s"], m.get("complete_s", m["next_step_s"]), m["step_s"], ratio])
        if m["step_s"] > STEP_LIMIT_S:
            missed.append(f"{system}: steps of {m['step_s']:.3f} s, more than {STEP_LIMIT_S} s")
        if ratio is not None and ratio < LEAST_RATIO.get(system, 0.0):
            missed.append(f"{system} is {ratio:.1f} times slower than ours, less than {LEAST_RATIO[system]:.0f}")
    lines += [[f"{system} (skipped: {why})", None, None, None, None] for system, why in skipped.items()]
    if ours is not None and ours > LIMIT_S:
        missed.append(f"ours takes {ours:.3f} s, more than {LIMIT_S} s")
    return "\n\n".join([*parts, results.table(head, lines)]), missed


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument(
        "--save", action="store_true", help="write the tables and a JSON into benchmarks/results/recovery/"
    )
    arguments = parser.parse_args()
    found: dict[str, Rows] = {}
    skipped: dict[str, str] = {}
    for system in arguments.systems:
        results.show(f"{system}: {arguments.kills} kills")
        try:
            found[system] = apart(system, arguments.kills)
        except ModuleNotFoundError as error:
            skipped[system] = str(error)
    text, missed = report(found, skipped)
    text += "\n" + results.verdict(missed)
    results.show("\n" + text)
    if arguments.save:
        results.save("recovery", "bench_recovery", text, {"systems": found, "skipped": skipped, "missed": missed})
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
