"""Own runs under random kills beside their forecast: `elastic-ring train` goes on to its end, and `forecast --score`
holds its goodput against that of its losses.

    python benchmarks/forecast/kills.py --every 12 -- --preset laptop --context 1024 --steps 90
    python benchmarks/forecast/kills.py --every 40 --freezes 0.3 --out runs -- --preset 1b --dp 2 --cp 1 ...

All words after -- are settings of train. A member is killed at any moment of a step, once so many steps are committed
since the last time and a spare is there; the last few steps are left alone. Prints each recovery and the score;
`--save NAME` adds the run to benchmarks/results/forecast/kills.json, which `score.py` reads.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness import runs
from benchmarks.harness.arguments import bench_parser
from benchmarks.harness.results import RESULTS, show
from elastic_ring.cli import settings
from elastic_ring.cli.forecasts.seen import Seen, read_run, score
from elastic_ring.forecast.sizing.machines import read_fleet

FIRST, LAST = 5, 5
NAME = "kills"
KEPT = RESULTS / "forecast" / "kills.json"


def kill_again_and_again(asked: Namespace, run: runs.Watcher, steps: int) -> int:
    """How many members got a signal."""
    rng = random.Random(asked.seed)
    run.more_steps(FIRST)
    number = 0
    while len(run.steps()) < steps - asked.every - LAST:
        status = run.whole(1)
        time.sleep(rng.uniform(0.0, run.steps()[-1]["step_s"]))
        victim = rng.choice(status["members"])["pid"]
        runs.inject(victim, signal.SIGSTOP if rng.random() < asked.freezes else signal.SIGKILL)
        number += 1
        run.until("a new generation", partial(newer, run, status["generation"]))
        run.more_steps(asked.every)
    return number


def newer(run: runs.Watcher, generation: int) -> bool | None:
    return True if run.status()["generation"] > generation else None


def run_to_its_end(asked: Namespace, folder: Path, over: threading.Event) -> int:
    flags = ["--run-name", NAME, "--storage-path", str(folder), *asked.train]
    try:
        with (folder / "train.log").open("w", encoding="utf-8") as log:
            command = [sys.executable, "-m", "elastic_ring", "train", *flags]
            return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    finally:
        over.set()


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--every", type=int, default=12, help="steps from one kill to the next")
    parser.add_argument("--freezes", type=float, default=0.0, help="the share that is stopped in place of killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fleet", default="h100-80", help="what ranks on GPUs are")
    parser.add_argument("--save", metavar="NAME", help="keep what was seen")
    parser.add_argument("train", nargs="+", help="settings of train, after --")
    asked = parser.parse_args()
    mesh_and_steps = settings.parse(asked.train)
    with runs.scratch() as folder:
        over = threading.Event()
        training = threading.Thread(target=run_to_its_end, args=(asked, folder, over))
        training.start()
        watcher = runs.Watcher(folder / NAME, over, mesh_and_steps.scaling.mesh.size)
        try:
            number = kill_again_and_again(asked, watcher, mesh_and_steps.step.steps)
        finally:
            training.join()
            show((folder / "train.log").read_text(encoding="utf-8").splitlines()[-1])
        for found in watcher.recoveries():
            parts = {name: round(found[name], 3) for name in ("detect_s", "close_s", "heal_s", "rerun_s")}
            show(f"  step {found['step']}: {found['cause']}; {found['action']} {parts}")
        show(f"{number} members lost")
        show("\n".join(score([folder / NAME], read_fleet(asked.fleet))))
        if asked.save:
            save(asked, read_run(folder / NAME)[1])
    return 0


def save(asked: Namespace, seen: Seen) -> None:
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    kept[asked.save] = {
        "train": asked.train,
        "fleet": asked.fleet,
        "every": asked.every,
        "freezes": asked.freezes,
        "seed": asked.seed,
        "kept_s": round(seen.kept_s, 3),
        "step_s": round(seen.figures["step_s"], 4),
        "mean_step_s": round(seen.mean_step_s, 4),
        "goodput": round(seen.figures["goodput"], 5),
        "losses": dict(seen.losses),
        "alone_step_s": seen.alone_step_s,
        "cores": os.cpu_count(),
        "day": time.strftime("%Y-%m-%d"),
    }
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
