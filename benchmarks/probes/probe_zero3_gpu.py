"""A step of ZeRO-3 in Ray Train with ring attention on GPUs, for beside `probe_steps_gpu.py speed`: time and memory.

    python benchmarks/probes/probe_zero3_gpu.py --preset 1b --context 65536 --cp 2
    python benchmarks/probes/probe_steps_gpu.py speed --preset 1b --context 65536 --dp 1 --cp 2 --batch 1

Model, first values, samples, kernel and types are those of the other probe, so are the losses but for rounding. It is a
whole job of Ray Train but for the checkpoint, which is left out: 14 bytes a parameter. The weights are written to
--folder, 4 bytes a parameter; memory is a quick place for them. Memory is the most in tensors on a GPU before they are
gathered. Model FLOPs utilisation is `benchmarks.harness.gpu_runs`'s.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.arguments import at_least_one, bench_parser
from benchmarks.harness.gpu_runs import GpuRun, utilisation
from elastic_ring.integrations.ray_train import Zero3Config, Zero3Trainer, Zero3Worker, train
from elastic_ring.integrations.ray_train.trainer import run_config, scaling_config
from elastic_ring.monitor.metrics import read_metrics

PLACES = ("none", "cpu")


def main(argv: list[str]) -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--preset", default="1b")
    parser.add_argument("--context", type=at_least_one, default=65536)
    parser.add_argument("--batch", type=at_least_one, default=1)
    parser.add_argument("--dp", type=at_least_one, default=1)
    parser.add_argument("--cp", type=at_least_one, default=2)
    parser.add_argument("--steps", type=at_least_one, default=4)
    parser.add_argument("--kernel", default="", help="pin one attention kernel")
    parser.add_argument("--fast", action="store_true", help="kernels that need not repeat their bits")
    parser.add_argument("--offload-optimizer", choices=PLACES, default="none")
    parser.add_argument("--offload-param", choices=PLACES, default="none")
    parser.add_argument("--folder", default="/dev/shm", help="where the run is kept meanwhile (/dev/shm)")
    parser.add_argument("--cpu", action="store_true", help="on gloo instead")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="probe-zero3-", dir=args.folder) as folder:
        print(json.dumps({"what": "zero3", **vars(args), **measure(args, Path(folder))}), flush=True)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    run = GpuRun(
        args.preset, args.context, args.batch, args.cp, args.dp, deterministic=not args.fast, kernel=args.kernel
    )
    summary = trainer(run, args, folder).fit().summary
    seconds = [line["step_s"] for line in read_metrics(folder / "probe")]
    steady = median(seconds[1:] or seconds)
    shutil.rmtree(folder / "probe")
    return {
        "first_s": round(seconds[0], 3),
        "step_s": round(steady, 4),
        "mfu": round(utilisation(run, steady), 4),
        "spread": round((max(seconds[1:]) - min(seconds[1:])) / steady, 3) if seconds[1:] else None,
        "peak_gib": round(summary["peak_gpu_bytes"] / 2**30, 1),
        "loss": float.fromhex(summary["losses"][-1]),
    }


def without_checkpoint(worker: Zero3Worker) -> None:
    worker.save = lambda: None  # type: ignore[method-assign]
    train(worker)


def trainer(run: GpuRun, args: argparse.Namespace, folder: Path) -> Zero3Trainer:
    base = run.trainer(folder, "base", args.steps)
    return Zero3Trainer(
        base.task.model,
        base.task.data,
        cp=run.cp,
        step_config=base.task.step,
        optim_config=base.task.optim,
        initial=base.task.initial,
        train_loop=without_checkpoint,
        scaling_config=scaling_config((run.dp * run.cp,) * 2, {"CPU": 1.0}, use_gpu=not args.cpu),
        run_config=run_config("probe", str(folder), max_failures=0),
        zero=Zero3Config(
            offload_optimizer=args.offload_optimizer, offload_param=args.offload_param, checkpoint_every_steps=0
        ),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
