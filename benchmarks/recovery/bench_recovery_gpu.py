"""How long a ring of GPUs is stopped when a worker is killed, and whether a bit changes.

    python benchmarks/recovery/bench_recovery_gpu.py --preset 1b --kills 10 --save

dp 2 x cp 2 on four GPUs (`--cp 1`: dp 2 on two) and standby processes that hold none. First a short run without faults
and the same with a planned kill, once for each of `--faults` (a phase of the step, or the heal after a kill): their
losses and weights are compared bit for bit. Then a run whose members are killed from outside at any moment of a step;
for each kill the phases from SIGKILL to the next committed step: detect (until the run's first event that says
so), close (abort, probe, rendezvous, groups and their self-test), heal (link, transfer, digests), rerun (the step
itself, apart).
Then `--in-building` pairs of kills, the second of which comes while the ring is being closed after the first. Rank 0
is never killed: its process lives through all kills and shows whether memory grows.

Exits 1 when bits differ, when a recovery was not exact, when the median of detect + close + heal is above LIMIT_S, when
the transfer of a heal is slower than LEAST_SHARE of what a plain copy between two GPUs reaches in the same run, or when
memory grows by more than HOST_SLOPE_MIB or GPU_SLOPE_MIB a kill.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from benchmarks.harness import gpu_runs, results, runs
from benchmarks.harness.arguments import bench_parser
from benchmarks.harness.gpu_runs import GpuRun
from elastic_ring.gpus import CONTEXT_BYTES
from elastic_ring.model.config import num_parameters

LIMIT_S, LEAST_SHARE = 1.0, 0.5
NEVER = 1_000_000
FAULTS = {
    **{phase: f"kill@step={{step}},phase={phase},rank={{last}}" for phase in ("backward", "reduce", "vote", "apply")},
    # The newcomer dies while its shard comes; another standby takes the place.
    "heal": "kill@step={step},phase=backward,rank={last}; kill@step={step},phase=heal,role=spare",
}
HOST_SLOPE_MIB, GPU_SLOPE_MIB = 5.0, 64.0
HOST, OWN = "rank 0's process", "rank 0's process on GPUs"
UNTABLED = ("memory", "memory_after", "own_gib", "own_after_gib", "spares", "action")
LEAST_SAMPLES = 4  # of memory, for a slope that means something
PAIR_RANKS = (3, 2)  # first and second of a pair: whatever each of them held, another rank holds too
STEPS_BETWEEN_KILLS = 2
MOMENT_S = 0.4
SETTLED_KILLS = 5
STEPS_AFTER = 6


def kill_once(run: runs.Watcher, number: int, num_spares: int, paced: int) -> dict[str, Any]:
    """Kill rank 1, 2, ... and the last, 1 again, ... at any moment of a step; the phases of the recovery.

    The first `paced` kills wait until all spares are back, as they are on any day when workers die minutes apart;
    the others come while new ones start on the same GPUs.
    """
    run.whole(1)
    run.more_steps(STEPS_BETWEEN_KILLS)
    status = run.whole(num_spares if number < max(1, paced) else 1)
    pids = {member["global_rank"]: member["pid"] for member in status["members"]}
    rank = 1 + number % (len(pids) - 1)
    memory = memory_gib(pids[0]) if number % SETTLED_KILLS == 0 else None
    own = own_gib(pids[0]) if memory else None
    num_there = len(status["spares"])
    time.sleep(random.Random(number).uniform(0.0, MOMENT_S))
    injected_s = runs.inject(pids[rank], signal.SIGKILL)
    step = runs.first_step_of(run, status["generation"])
    recovery = run.until("its record", lambda: run.recoveries()[number] if len(run.recoveries()) > number else None)
    phases, next_step_s = recovery["phases"], step["committed_monotonic_s"] - injected_s
    # Lengths alone, each by one clock: a host's was set by 0.2 s between two kills. The run's begin with its notice.
    told = {"detect_s": max(0.0, next_step_s - recovery["total_s"])}
    told |= {name: recovery[name] for name in ("close_s", "heal_s", "rerun_s")}
    wire_GB_s = phases.get("heal_bytes", 0.0) / max(phases.get("wire_s", 0.0), 1e-9) / 1e9
    row = {
        "kill": number,
        "rank": rank,
        **told,
        "next_step_s": next_step_s,
        "wire_GB_s": wire_GB_s,
        **{
            name: phases.get(name, 0.0)
            for name in (
                "free_s",
                "device_s",
                "connect_s",
                "meet_s",
                "world_s",
                "groups_s",
                "test_s",
                "roll_s",
                "link_s",
                "wire_s",
                "verify_s",
            )
        },
        "exact": recovery["exact"],
    }
    row = {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}
    results.show(f"  {row}" + (f" memory {memory}, {own} its own" if memory else ""))
    return {**row, "memory": memory, "own_gib": own, "spares": num_there, "action": recovery["action"]}


def all_kills(args: argparse.Namespace, run: runs.Watcher) -> dict[str, Any]:
    """The rows of `--kills`, how long the steps after them took, then the rows of `--in-building`."""
    rows = kill_again_and_again(run, args.kills, args.spares, args.paced, args.limit_s) if args.kills else []
    after = [round(seconds, 3) for seconds in steps_after(run.steps())]
    pairs = [kill_two(run, number, args.spares) for number in range(args.in_building)]
    return {"kills": rows, "steps_after_s": after, "pairs": pairs}


def kill_again_and_again(
    run: runs.Watcher, num_kills: int, num_spares: int, paced: int, limit_s: float
) -> list[dict[str, Any]]:
    """Until so many are killed or the time is over; the last row has what is in use once all spares are back."""
    rows: list[dict[str, Any]] = []
    run.more_steps(1)
    deadline = time.monotonic() + limit_s
    while len(rows) < num_kills and time.monotonic() < deadline:
        rows.append(kill_once(run, len(rows), num_spares, paced))
    run.whole(num_spares)
    pid = next(member["pid"] for member in run.status()["members"] if member["global_rank"] == 0)
    rows[-1] |= {"memory_after": memory_gib(pid), "own_after_gib": own_gib(pid)}
    return rows


def steps_after(steps: list[dict[str, Any]]) -> list[float]:
    """Seconds from commit to commit up to the second, third, ... step of a generation, medians over all generations
    but the first that had so many: what a step costs in which members settle, beside its neighbours."""
    committed: dict[int, list[float]] = {}
    for step in steps:
        committed.setdefault(step["generation"], []).append(step["committed_monotonic_s"])
    long = [times for times in list(committed.values())[1:] if len(times) >= STEPS_AFTER]
    return [median(times[n] - times[n - 1] for times in long) for n in range(1, STEPS_AFTER)] if long else []


def kill_two(run: runs.Watcher, number: int, num_spares: int) -> dict[str, Any]:
    """Kill one rank, and another while the ring is being built anew; how the ring closed after both."""
    run.whole(1)
    run.more_steps(STEPS_BETWEEN_KILLS)
    status = run.whole(num_spares)
    before, generation = len(run.recoveries()), status["generation"]
    pids = [next(m["pid"] for m in status["members"] if m["global_rank"] == rank) for rank in PAIR_RANKS]

    def building() -> bool | None:
        orders = [order for line in run.journal() for order in line.get("commands", ()) if order["type"] == "Build"]
        return True if any(order["generation"] > generation for order in orders) else None

    first_s = runs.inject(pids[0], signal.SIGKILL)
    run.until("the order to build", building, poll_s=0.005)
    time.sleep(random.Random(number).uniform(0.0, MOMENT_S))
    second_s = runs.inject(pids[1], signal.SIGKILL)
    run.whole(1)
    run.more_steps(1)
    found = run.recoveries()[before:]
    row = {
        "pair": number,
        "apart_s": round(second_s - first_s, 3),
        "next_step_s": round(run.steps()[-1]["committed_monotonic_s"] - second_s, 3),
        "recoveries": [{key: recovery[key] for key in ("cause", "action", "exact")} for recovery in found],
    }
    results.show(f"  {row}")
    return row


def slope(points: list[tuple[float, float]]) -> float:
    """Of the straight line through (x, y) with the least squares."""
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def growth(rows: list[dict[str, Any]]) -> dict[str, float]:
    """MiB a kill: of rank 0's process on the host and, where known, on GPUs, then of each GPU, where every standby
    that was there at the time is counted with its context. Empty with too few samples; the first, before anything was
    killed, is left out."""
    samples = [row for row in rows if row["memory"] and row["kill"] > 0]
    if len(samples) < LEAST_SAMPLES:
        return {}
    series = {HOST: [row["memory"][0] for row in samples]}
    if all(row.get("own_gib") for row in samples):
        series[OWN] = [row["own_gib"] for row in samples]
    for index in range(len(samples[0]["memory"]) - 1):
        series[f"GPU {index}"] = [row["memory"][1 + index] - row["spares"] * CONTEXT_BYTES / 2**30 for row in samples]
    kills = [float(row["kill"]) for row in samples]
    return {name: 1024 * slope(list(zip(kills, gib, strict=True))) for name, gib in series.items()}


def outgrown(rows: list[dict[str, Any]]) -> list[str]:
    limits = {HOST: HOST_SLOPE_MIB}
    return [
        f"memory of {name} grows by {mib:.1f} MiB a kill, more than {limits.get(name, GPU_SLOPE_MIB):g}"
        for name, mib in growth(rows).items()
        if mib > limits.get(name, GPU_SLOPE_MIB)
    ]


def memory_gib(pid: int) -> list[float]:
    """Host memory of one process, then memory in use on each GPU."""
    in_use = (psutil.Process(pid).memory_info().rss / 2**30, *(mib / 1024 for mib in gpu_runs.device_memory_mib()))
    return [round(gib, 2) for gib in in_use]


def own_gib(pid: int) -> float | None:
    """GPU memory of one process, its context with it."""
    mib = gpu_runs.process_memory_mib(pid)
    return None if mib is None else round(mib / 1024, 2)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    run = GpuRun(
        args.preset,
        args.context,
        args.batch,
        args.cp,
        spares=args.spares,
        kernel=args.kernel,
        release_contexts=args.release_contexts,
    )
    figures: dict[str, Any] = {"run": gpu_runs.described(run), "parameters": num_parameters(run.model)}
    figures["paced"] = args.paced
    figures["link_GB_s"] = gpu_runs.link_rate()
    with runs.scratch() as folder, runs.local_ray(num_cpus=32):
        try:
            if args.short_steps:
                calm = run.trainer(folder, "calm", args.short_steps).fit().summary
                results.show(f"  the run without faults is done, losses {calm['losses'][0]} .. {calm['losses'][-1]}")
                figures |= {"same": {}, "planned": {}}
                for name in args.faults.split(","):
                    fault = FAULTS[name].format(step=args.short_steps // 2, last=run.dp * run.cp - 1)
                    faulty = run.trainer(folder, f"faulty-{name}", args.short_steps, fault).fit().summary
                    results.show(f"  planned kill in {name}: {faulty['recoveries']}")
                    kinds = ("losses", "weights_sha256", "samples_sha256")
                    figures["same"][name] = {kind: calm[kind] == faulty[kind] for kind in kinds}
                    figures["planned"][name] = faulty["recoveries"]
                    results.show(f"  equal to the run without faults: {figures['same'][name]}")
            if args.kills or args.in_building:
                trainer = run.trainer(folder, "killed", NEVER)
                figures |= runs.train_while(trainer, partial(all_kills, args))
        finally:
            if args.keep_logs:
                runs.keep_logs(folder, Path(args.keep_logs))
    return figures


def memory_text(rows: list[dict[str, Any]]) -> str:
    text = "\nGiB of rank 0's process on the host and in use on each GPU; of that process on GPUs:"
    for row in rows:
        if row["memory"]:
            text += f"\n  before kill {row['kill']}, {row['spares']} spares there: {row['memory']}; {row['own_gib']}"
    text += f"\n  after the last, all spares there: {rows[-1]['memory_after']}; {rows[-1]['own_after_gib']}"
    told = ", ".join(f"{name} {mib:+.1f}" for name, mib in growth(rows).items())
    told = told or f"not known, fewer than {LEAST_SAMPLES} samples after kills"
    return f"{text}\n  growth in MiB a kill, contexts of standbys aside: {told}"


def report(figures: dict[str, Any]) -> tuple[str, list[str]]:
    run, rows = figures["run"], figures.get("kills", [])
    text = (
        f"{run['preset']}, {figures['parameters']:,} parameters, {run['context']} tokens, mesh 2 x {run['cp']}, "
        f"{run['gpus']} x {run['gpu']}, NCCL {run['nccl']}\na plain copy between two GPUs: "
        f"{figures['link_GB_s']:.0f} GB/s"
    )
    missed = []
    if rows:
        names = [name for name in rows[0] if name not in UNTABLED]
        stills = [row["detect_s"] + row["close_s"] + row["heal_s"] for row in rows]
        still = median(stills[: figures["paced"]] or stills)
        share = median(row["wire_GB_s"] for row in rows) / figures["link_GB_s"]
        medians = ["median", "", *(median(row[n] for row in rows) for n in names[2:-1]), ""]
        text += (
            f"\n{results.table(names, [*([row[n] for n in names] for row in rows), medians])}\n"
            f"median of detect + close + heal {still:.3f} s in the first {figures['paced']} (limit {LIMIT_S} s), "
            f"{median(stills):.3f} s in all {len(rows)}; of the rerun "
            f"{median(row['rerun_s'] for row in rows):.3f} s; transfer at {100 * share:.0f} % of the plain copy\n"
            f"seconds of the 2nd, 3rd, ... step of a generation that had {STEPS_AFTER}, without the first: "
            f"{', '.join(map(str, figures.get('steps_after_s', []))) or 'not known'}"
        )
        text += memory_text(rows)
        missed += [f"detect + close + heal took {still:.3f} s, more than {LIMIT_S} s"] if still > LIMIT_S else []
        missed += [f"the transfer reaches {share:.2f} of a copy"] if share < LEAST_SHARE else []
        missed += [f"kill {row['kill']} was not exact: {row['action']}" for row in rows if not row["exact"]]
        missed += outgrown(rows)
    for row in figures.get("pairs", ()):
        text += f"\nkilled {row['apart_s']} s after another one, while the ring was being closed: {row['recoveries']}"
        missed += [
            f"pair {row['pair']} was not exact: {found['action']}" for found in row["recoveries"] if not found["exact"]
        ]
    for name, same in figures.get("same", {}).items():
        text += f"\na planned kill in {name}, equal to the run without faults: {same}"
        missed += [f"{kind} of a kill in {name} differ from the run without faults" for kind in same if not same[kind]]
    return text, missed


def phases(text: str) -> str:
    unknown = [name for name in text.split(",") if name not in FAULTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: choose of {','.join(FAULTS)}")
    return text


def main(argv: list[str]) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--preset", default="100m")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--paced", type=int, default=10, help="so many first kills wait until all spares are back")
    parser.add_argument("--limit-s", type=float, default=1e9, help="kill no more after this time")
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--kernel", default="", help="pin one attention kernel")
    parser.add_argument(
        "--release-contexts",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="members let go of the other GPUs",
    )
    parser.add_argument("--short-steps", type=int, default=12, help="of the two runs that are compared; 0: leave out")
    parser.add_argument("--faults", type=phases, default="backward", help=f"planned kills: {','.join(FAULTS)}")
    parser.add_argument("--in-building", type=int, default=0, help="pairs of kills, the second while the ring closes")
    parser.add_argument("--keep-logs", help="a folder for the runs' journals and the workers' logs")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/")
    args = parser.parse_args(argv)
    if args.in_building and args.cp < 2:
        parser.error("--in-building kills two of four ranks: it needs --cp 2")
    if args.spares < 2 and (args.in_building or (args.short_steps and "heal" in args.faults.split(","))):
        parser.error("two places are empty at once: give --spares 2")
    figures = measure(args)
    text, missed = report(figures)
    results.show(text)
    for line in missed:
        results.show(f"MISSED: {line}")
    if args.save:
        name = f"bench_recovery_gpu-{args.preset}-2x{args.cp}"
        results.save("recovery", name, "\n".join([text, *(f"MISSED: {m}" for m in missed)]), figures)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
