"""The elastic ring beside ZeRO-3 in Ray Train on one model: memory, speed, and the time to recover from a SIGKILL.

    python benchmarks/recovery/bench_zero3.py --save

Each runs in a process and a Ray of its own, through its own door, on the same samples, on CPUs, as 2 rings of 2. The
elastic ring has a spare beside them, which holds no state. One worker is killed from outside by its PID in a step in
the middle. Ray Train looks at its workers every 2 s, its default, and begins at its last checkpoint (every 2 steps).

  memory     private memory (USS) of a worker, the largest of its samples every 0.2 s, the largest of the workers; over
             `start`, that of a worker of the same door with a model of one narrow layer
  step       median of the steps that did not follow a kill, on rank 0's clock
  recover    from the last step before the kill to the first that commits after it, in the run's own records

CPU offload moves what a CPU holds anyway; on a CPU it shows what it costs, not what it saves. What is on NVMe is saved
on a CPU, too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.arguments import at_least_one, bench_parser
from benchmarks.harness.results import ROOT, save, show, table

OFFLOADED_SYSTEMS = {"zero3-cpu": "cpu", "zero3-nvme": "nvme"}
SYSTEMS = ("elastic", "zero3", *OFFLOADED_SYSTEMS)
LIMIT_S, POLL_S = 800.0, 0.2
MIB = 2**20


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--systems", type=lambda text: text.split(","), default=list(SYSTEMS))
    parser.add_argument("--steps", type=at_least_one, default=7)
    parser.add_argument("--kill-after", type=at_least_one, default=3, help="kill once this step is committed (3)")
    parser.add_argument("--layers", type=at_least_one, default=6)
    parser.add_argument("--width", type=at_least_one, default=384)
    parser.add_argument("--context", type=at_least_one, default=512)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-zero3-") as folder:
        rows, start = [], dict[str, int]()
        for system in args.systems:
            door = system.partition("-")[0]
            if door not in start:
                start[door] = run(door, args, Path(folder, f"{door}-small"), layers=1, width=32, kill=False)["bytes"]
            rows.append(measure(system, args, Path(folder, system), start[door]))
    head = ["system", "worker MiB", "start MiB", "state MiB", "step s", "recover s", "steps again", "last loss"]
    text = table(
        head,
        [
            [
                row[key]
                for key in (
                    "system",
                    "worker_mib",
                    "start_mib",
                    "state_mib",
                    "step_s",
                    "recover_s",
                    "steps_rerun",
                    "last_loss",
                )
            ]
            for row in rows
        ],
    )
    show(text)
    if args.save:
        save(
            "training",
            "bench_zero3",
            text,
            {"rows": rows, "layers": args.layers, "width": args.width, "context": args.context},
        )


def measure(system: str, args: argparse.Namespace, folder: Path, start_bytes: int) -> dict[str, Any]:
    kill = system not in OFFLOADED_SYSTEMS  # which recover as Ray Train does without them
    whole = run(system, args, folder, layers=args.layers, width=args.width, kill=kill)
    summary = whole["summary"]
    recovery: dict[str, Any] = summary["recoveries"][0] if kill else {"step": 0, "total_s": None, "steps_rerun": None}
    warm = {0, recovery["step"], recovery["step"] + 1}
    row = {
        "system": system,
        "worker_mib": round(whole["bytes"] / MIB),
        "start_mib": round(start_bytes / MIB),
        "state_mib": round((whole["bytes"] - start_bytes) / MIB),
        "step_s": median(line["step_s"] for line in whole["steps"] if line["step"] not in warm),
        "recover_s": recovery["total_s"],
        "steps_rerun": recovery["steps_rerun"],
        "last_loss": float.fromhex(summary["losses"][-1]),
    }
    show(f"{system}: {row}")
    return row


def run(system: str, args: argparse.Namespace, folder: Path, *, layers: int, width: int, kill: bool) -> dict[str, Any]:
    """Train once; summary, steps, and the most private memory of a worker."""
    process = subprocess.Popen(
        command(system, args, folder, layers, width),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "RAY_ADDRESS": "local",
            "RAY_worker_niceness": "0",
        },
    )
    most, killed, deadline = 0, not kill, time.monotonic() + LIMIT_S
    try:
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{system} did not end within {LIMIT_S:.0f} s")
            pids = workers(system, folder / "run")
            most = max([most, *(private_bytes(pid) for pid in pids)])
            if not killed and len(pids) == 4 and last_step(folder / "run") >= args.kill_after:
                os.kill(pids[1], signal.SIGKILL)
                killed = True
            time.sleep(POLL_S)
        assert process.stderr is not None
        if process.returncode:
            raise RuntimeError(f"{system} failed: {process.stderr.read()[-2000:]}")
    finally:
        process.kill()
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return {"summary": summary, "steps": lines(folder / "run" / "metrics.jsonl"), "bytes": most}


def command(system: str, args: argparse.Namespace, folder: Path, layers: int, width: int) -> list[str]:
    script = "train_1t.py" if system == "elastic" else "train_zero3.py"
    model = [
        f"--model.num-layers={layers}",
        f"--model.width={width}",
        f"--model.ffn-width={3 * width}",
        f"--context={args.context}",
        "--global-batch=4",
        f"--steps={args.steps}",
    ]
    where = [f"--storage-path={folder}", "--run-name=run"]
    if system == "elastic":
        mesh = ["--dp=2", "--cp=2", "--spares=1", "--checkpoint-every-steps=0"]
    else:
        place = OFFLOADED_SYSTEMS.get(system, "none")
        mesh = [
            "--workers=4",
            "--cp=2",
            "--checkpoint-every-steps=2",
            f"--offload-optimizer={place}",
            f"--offload-param={place}",
            f"--nvme-path={folder}/swap",
        ]
    return [sys.executable, str(ROOT / "jobs" / script), *model, *where, *mesh]


def workers(system: str, folder: Path) -> list[int]:
    """PIDs of the members, in the order of their ranks."""
    if system != "elastic":
        groups = [line for line in lines(folder / "attempts.jsonl") if line["note"] == "attempt"]
        return [worker["pid"] for worker in groups[-1]["workers"]] if groups else []
    path = folder / "status.json"
    try:
        members = json.loads(path.read_text())["members"]
    except (FileNotFoundError, ValueError):
        return []
    return [member["pid"] for member in members if member["pid"]]


def private_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except psutil.Error:
        return 0


def last_step(folder: Path) -> int:
    return max([line["step"] for line in lines(folder / "metrics.jsonl") if "loss_hex" in line], default=-1)


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal that is being written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


if __name__ == "__main__":
    main()
