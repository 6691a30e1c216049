"""The product's step on static groups of GPUs, without Ray and coordinator: bits, time, and profile.

    python benchmarks/probes/probe_steps_gpu.py bits --preset 100m --context 8192
    python benchmarks/probes/probe_steps_gpu.py speed --preset 1b --context 131072 --batch 2
    python benchmarks/probes/probe_steps_gpu.py speed --preset 1b --context 131072 --fast --pattern bigbird:52,0,52
    python benchmarks/probes/probe_steps_gpu.py broken --preset 100m --dp 1 --generations 8

`bits` trains twice from the same state and compares, on every rank and after every step, the summed gradient and
the parameters. `speed` prints step time, model FLOPs utilisation and memory, and with `--profile` where rank 0's GPU
spent a step. With `--pattern` the step is timed dense, with the pattern, and with each query's own block alone: what
remains then is not attention, and bounds the gain of any pattern (Amdahl). `broken` aborts the groups at random
moments of steps, repeatedly, and prints the memory that each aborted generation leaves allocated.
Processes are spawned with the environment of the product's workers; groups are made by its `Connector`.

Model FLOPs utilisation is `benchmarks.harness.gpu_runs`'s.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import logging
import multiprocessing
import os
import pstats
import sys
import time
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

if __name__ in ("__main__", "__mp_main__"):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
import torch
from torch.distributed import TCPStore

from benchmarks.harness.arguments import bench_parser
from benchmarks.harness.gpu_profile import profiled
from benchmarks.harness.gpu_runs import PEAK_FLOPS, GpuRun, utilisation
from benchmarks.probes.broken_steps import broken
from benchmarks.probes.gpu_steps import build, connected, one_step
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.runtime.gpu.device import be_deterministic, kernel_cache, visible_gpus, warm_devices
from elastic_ring.runtime.groups import nccl
from elastic_ring.state.device_sums import device_digests
from elastic_ring.train.startup.layouts import attention_shapes
from elastic_ring.train.startup.warm import warm_up_device


def bits(run: GpuRun, rank: int, ports: list[int], device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    stories: list[list[dict[str, Any]]] = []
    for attempt in range(2):
        state = build(run, connected(run, rank, ports[attempt], f"{attempt}/1", device), device)
        story: list[dict[str, Any]] = []
        for step in range(args.steps):
            spans, losses = dict[str, float](), list[float]()
            profile = cProfile.Profile() if args.profile and rank == 0 and attempt == 0 and step == 0 else None
            if profile:
                profile.enable()
            seconds, gradient = one_step(state, step, spans, losses)
            if profile:
                profile.disable()
                text = io.StringIO()
                pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(30)
                pstats.Stats(profile, stream=text).sort_stats("cumtime").print_stats(60)
                Path(args.profile).write_text(text.getvalue())
            assert state.shard is not None
            params = list(state.shard.params.values())
            whole = "".join(d.hex()[16:48] for d in device_digests(params))
            story.append(
                {
                    "loss": losses[-1],
                    "gradient": gradient[16:48],
                    "params": hash(whole),
                    "s": seconds,
                    "each": [d.hex()[16:] for d in device_digests(params)],
                }
            )
        stories.append(story)
        names = list(state.shard.params)  # type: ignore[union-attr]
        del state
    same = [
        {what: a[what] == b[what] for what in ("loss", "gradient", "params")} for a, b in zip(*stories, strict=True)
    ]
    odd: list[str] = []
    for a, b in zip(*stories, strict=True):
        odd = [n for n, x, y in zip(names, a["each"], b["each"], strict=True) if x != y]
        if odd:
            break
    times = [round(x["s"], 3) for x in stories[1][:4]]
    equal = sum(all(row.values()) for row in same)
    return {"equal_steps": equal, "of": len(same), "same": same[: equal + 1][-1], "odd": len(odd), "s": times}


def speed(run: GpuRun, rank: int, ports: list[int], device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    state = build(run, connected(run, rank, ports[0], "0/1", device), device)
    losses: list[float] = []
    host_s: dict[str, float] = {}
    seconds = [one_step(state, step, losses=losses, host_s=host_s)[0] for step in range(args.steps)]
    peaks, kinds = peak_bytes(device), {}
    if args.profile:
        kinds = profiled(lambda: one_step(state, state.applied))  # on all ranks: they wait for each other
    steady = median(seconds[1:])
    used = utilisation(run, steady)
    return {
        "first_s": round(seconds[0], 3),
        "step_s": round(steady, 4),
        "mfu": round(used, 4),
        "tflops": round(used * PEAK_FLOPS / 1e12, 1),
        "spread": round((max(seconds[1:]) - min(seconds[1:])) / steady, 3),
        "peak_gib": round(peaks[0] / 2**30, 1),
        "reserved_gib": round(peaks[1] / 2**30, 1),
        "loss": losses[-1],
        "host_ms": {part: round(1e3 * at, 1) for part, at in host_s.items()},
        **({"profile": kinds} if kinds and rank == 0 else {}),
    }


def peak_bytes(device: torch.device) -> tuple[int, int]:
    """(peak bytes in tensors, peak bytes reserved on the device); on a CPU the current RSS for both."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return (psutil.Process().memory_info().rss,) * 2


def warm(run: GpuRun, device: torch.device, all_devices: bool) -> None:
    if device.type == "cpu":
        return
    task = run.trainer(Path("/tmp"), "probe", 1000).task
    be_deterministic(task)
    if all_devices:
        warm_devices(task, visible_gpus(), run.cp)
    else:
        warm_up_device(task, device, attention_shapes(task), run.cp, kernel_cache(), {})
    torch.cuda.set_device(device)


def child(rank: int, end: Connection, ports: list[int], run: GpuRun, args: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.WARNING, format=f"[{rank}] %(message)s")
    try:
        device = torch.device("cpu") if args.cpu else torch.device("cuda", rank)
        begun = time.monotonic()
        if args.cpu:
            torch.set_num_threads(1)
        warm(run, device, args.warm_all)
        warm_s = time.monotonic() - begun
        work = {"bits": bits, "speed": speed, "broken": broken}[args.what]
        end.send({"rank": rank, "warm_s": round(warm_s, 2), **work(run, rank, ports, device, args)})
    except BaseException:
        end.send({"rank": rank, "error": traceback.format_exc()[-1500:]})
    end.recv()  # keep this rank's groups until all are done


def measure(run: GpuRun, args: argparse.Namespace) -> list[dict[str, Any]]:
    os.environ.update({**nccl.ENVIRONMENT, **dict(pair.split("=") for pair in args.env)})
    context = multiprocessing.get_context("spawn")
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    ends, processes = [], []
    for rank in range(run.dp * run.cp):
        ours, theirs = context.Pipe()
        process = context.Process(target=child, args=(rank, theirs, [s.port for s in stores], run, args), daemon=True)
        process.start()
        ends.append(ours)
        processes.append(process)
    answers = [
        end.recv() if end.poll(args.timeout) else {"rank": i, "error": "no answer"} for i, end in enumerate(ends)
    ]
    for process in processes:
        process.kill()
    for process in processes:
        process.join()  # its GPU memory is free once it has exited
    return answers


def main(argv: list[str]) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("what", choices=["bits", "speed", "broken"])
    parser.add_argument("--preset", default="100m")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--generations", type=int, default=8, help="of broken")
    parser.add_argument("--break-s", type=float, default=1.0, help="of broken: the latest moment of an abort")
    parser.add_argument("--trace", action="store_true", help="of broken: where what is left was allocated")
    parser.add_argument("--cpu", action="store_true", help="broken and speed on gloo instead")
    parser.add_argument("--kernel", default="")
    parser.add_argument("--pattern", default="", help="a sparse pattern, in short form or a JSON file")
    parser.add_argument("--fast", action="store_true", help="kernels that need not repeat their bits")
    parser.add_argument("--no-checkpoint", action="store_true", help="keep all activations")
    parser.add_argument("--offload", action="store_true", help="activations wait in host memory")
    parser.add_argument(
        "--cpu-offload", choices=["none", "optimizer", "all"], default="none", help="state in host memory"
    )
    parser.add_argument("--warm-all", action="store_true", help="warm every GPU, as a standby does")
    parser.add_argument("--profile", default="", help="bits: write the host's profile to this file; speed: any value")
    parser.add_argument("--env", nargs="*", default=[], help="NAME=VALUE for the processes")
    parser.add_argument("--timeout", type=float, default=120.0)
    args = parser.parse_args(argv)
    run = GpuRun(
        args.preset,
        context=args.context,
        batch=args.batch,
        cp=args.cp,
        dp=args.dp,
        deterministic=not args.fast,
        kernel=args.kernel,
        checkpoint=not args.no_checkpoint,
        offload=args.offload,
        cpu_offload=args.cpu_offload,
    )
    text = Path(args.pattern).read_text(encoding="utf-8") if Path(args.pattern).is_file() else args.pattern
    if text and args.what == "speed":
        return against_dense(run, text, args)
    answers = measure(replace(run, pattern=text), args)
    show(answers, args)
    return int(any("error" in answer for answer in answers))


def show(answers: list[dict[str, Any]], args: argparse.Namespace, variant: str = "") -> None:
    chosen = (
        "what",
        "preset",
        "context",
        "kernel",
        "fast",
        "no_checkpoint",
        "offload",
        "cpu_offload",
        "dp",
        "cp",
        "batch",
        "env",
    )
    asked = {name: value for name, value in vars(args).items() if name in chosen}
    for answer in answers:
        print(json.dumps({**asked, **({"variant": variant} if variant else {}), **answer}), flush=True)


OWN_BLOCK = "bigbird:1,0,0"
"""The sparsest pattern that the same kernels can run."""


def against_dense(run: GpuRun, text: str, args: argparse.Namespace) -> int:
    """Time the step dense, with the pattern, and with own blocks only; print Amdahl's bound for its density."""
    steps = {}
    for name, pattern in (("dense", ""), ("pattern", text), ("own block", OWN_BLOCK)):
        answers = measure(replace(run, pattern=pattern), args)
        show(answers, args, pattern or "dense")
        if any("error" in answer for answer in answers):
            return 1
        steps[name] = max(answer["step_s"] for answer in answers)
    model = run.model
    densities = {
        name: parse_pattern(each).density(run.context, model.num_layers, model.num_heads, model.num_kv_heads)
        for name, each in (("pattern", text), ("own block", OWN_BLOCK))
    }
    # Own blocks have a density above 0: extrapolate the line through dense and own blocks to 0.
    least = densities["own block"]
    other = (steps["own block"] - steps["dense"] * least) / (1 - least)
    attention = steps["dense"] - other
    bound = steps["dense"] / (other + attention * densities["pattern"])
    gained = steps["dense"] / steps["pattern"]
    print(
        json.dumps(
            {
                "pattern": args.pattern,
                "density": round(densities["pattern"], 5),
                "dense_s": steps["dense"],
                "sparse_s": steps["pattern"],
                "own_block_s": steps["own block"],
                "not_attention_s": round(other, 4),
                "attention_share": round(attention / steps["dense"], 4),
                "speed_up": round(gained, 3),
                "amdahl_bound": round(bound, 3),
                "of_bound": round(gained / bound, 4),
            }
        ),
        flush=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
