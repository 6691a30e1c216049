"""How long a ring of GPUs stands still when a worker is killed, and whether a bit changes.

    python jobs/bench_recovery_gpu.py --preset 100m --kills 5 --save

dp 2 x cp 2 on four GPUs and one standby process that holds none. First a short run without faults and the same
with a planned kill: their losses and weights are compared bit for bit. Then a run whose members are killed from
outside at any moment; for each kill the phases from SIGKILL to the next committed step. `close` holds notice,
abort, probe, rendezvous, groups and their self-test; `rerun` the step itself.

Exits 1 when bits differ or the median of detect + close + heal is above LIMIT_S.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":  # run from a checkout, where jobs is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from elastic_ring import ElasticRingTrainer, OptimConfig, RunConfig, ScalingConfig, StepConfig
from elastic_ring.data.source import StdlibText
from elastic_ring.model.config import num_parameters, preset
from elastic_ring.model.init import Initialiser
from elastic_ring.model.transformer import Transformer
from jobs import drills
from jobs.bench_recovery import NEVER, kill_once

LIMIT_S = 1.0
SHORT_STEPS = 12
FAULT = "kill@step=6,phase=backward,rank=3"


def trainer_of(args: argparse.Namespace, folder: Path, name: str, steps: int, faults: str = "") -> ElasticRingTrainer:
    config = preset(args.preset)
    step = StepConfig(
        steps=steps, global_batch=args.batch, context_tokens=args.context, param_dtype="bfloat16", check_model=False
    )
    return ElasticRingTrainer(
        partial(Transformer, config), StdlibText(args.context), step=step,
        optim=OptimConfig(peak_lr=3e-4, min_lr=3e-5, warmup_steps=10, total_steps=steps),
        scaling=ScalingConfig(dp=2, cp=args.cp, spares=1, device="cuda", resources_per_worker={"CPU": 1.0}),
        run=RunConfig(name, str(folder / name), faults=faults, progress=False),  # type: ignore[arg-type]
        initial=Initialiser(0, config.num_layers),
    )  # fmt: skip


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with drills.scratch() as folder, drills.local_ray():
        calm = trainer_of(args, folder, "calm", SHORT_STEPS).fit().summary
        drills.show("  the run without faults is done")
        struck = trainer_of(args, folder, "struck", SHORT_STEPS, FAULT).fit().summary
        drills.show(f"  planned kill: {struck['recoveries']}")
        trainer = trainer_of(args, folder, "killed", NEVER)
        rows = drills.train_while(trainer, lambda run: [kill_once(run, number) for number in range(args.kills)])
    same = {name: calm[name] == struck[name] for name in ("losses", "weights_sha256", "samples_sha256")}
    return {"parameters": num_parameters(preset(args.preset)), "same": same, "kills": rows,
            "planned": struck["recoveries"]}  # fmt: skip


def report(args: argparse.Namespace, figures: dict[str, Any]) -> tuple[str, list[str]]:
    rows = figures["kills"]
    names = list(rows[0])
    still = median(row["detect_s"] + row["close_s"] + row["heal_s"] for row in rows)
    text = (
        f"{args.preset}, {figures['parameters']:,} parameters, {args.context} tokens, mesh 2 x {args.cp}, "
        f"{torch.cuda.get_device_name(0)}\n{drills.table(names, [[row[n] for n in names] for row in rows])}\n"
        f"median of detect + close + heal {still:.3f} s (limit {LIMIT_S} s), of the next step "
        f"{median(row['next_step_s'] for row in rows):.3f} s\nequal to the run without faults: {figures['same']}"
    )
    missed = [] if still <= LIMIT_S else [f"detect + close + heal took {still:.3f} s, more than {LIMIT_S} s"]
    missed += [f"{name} differ from the run without faults" for name, same in figures["same"].items() if not same]
    return text, missed


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="100m")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/")
    args = parser.parse_args(argv)
    figures = measure(args)
    text, missed = report(args, figures)
    drills.show(text)
    for line in missed:
        drills.show(f"MISSED: {line}")
    if args.save:
        drills.save("bench_recovery_gpu", text, figures)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
