"""What a healthy step pays for being recoverable: elastic_ring against the same loop with nothing around it.

    python benchmarks/recovery/bench_overhead.py --blocks 12 --save

One Ray cluster, two sets of four processes with the same model, data and mesh, in alternating blocks:

  product   `fit()` with everything on: coordinator, node agent, spare, stamps, votes, digests, publishing, the
            hooks of planned faults, the driver that follows
  plain     `plain_loop.py`: stock static groups, the same FSDP2, ring attention, all-reduce, clip and AdamW

How they take turns: a set that pauses must be between two steps and cost the other nothing.
The product pauses in the user's loss function, which waits on a socket before the first sequence of a block;
so the product does not know of the bench. While the plain loop has its turn, the product's
processes (agent, coordinator, workers, spare) are stopped by SIGSTOP once they wait at the gate, the agent
first, and continued in the opposite order: their background work would otherwise slow the plain loop down and
hide a part of the overhead. The waiting limits between coordinator and agent are raised so that these stops
mean nothing to them. The order of the two turns swaps with each pair of blocks, against drift.

A step's time is from one commit to the next on rank 0, on one clock (the product's from its own metrics); the
first step of a block holds the pause and is left out, the first block of each set is too. The upper bound is
the 95th percentile of the ratio of medians when pairs of blocks are drawn with replacement. The losses of both
are compared over the first block, so that both are known to do the same work; later the two drift apart, because
they add the gradient's norm up in another order and training amplifies the last bit.

`--model gpu-1b` does the same on four GPUs, as two rings of two; `--model gpu-8b` as one ring of four, because both
loops hold their state at once, about 2 x 37 GiB on each GPU beside the activations. Both tell the model FLOPs
utilisation with the machinery and without. `--dp` and `--cp` take other meshes. Where both do not fit, `--apart` trains
one block of each, the plain loop first, and its processes end before the product's begin: the drift between the two is
in the ratio then, and nothing is held to a bound but the losses.

`--copies 1 --copy-every 10` does all of it twice, without copies in peers' memory and with them, and gives the ratio of
both overheads: what copies cost. It is taken over means, since only some steps have copies beside them; 21 steps of a
block let them fall on any step of it. With `--apart` the product trains `--block-steps` steps without copies and then
with them, and no plain loop beside it; the losses must be equal bit for bit. `--in-turns N` is one run of so many steps
instead, with copies in N steps and without in the next N: what drifts between two runs is not in the ratio then, and
there are no other losses to compare.

Exits 1 when the upper bound is above 5 % (on GPUs 0.5 %; what copies cost: 5 % and 1 %), or the losses differ.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import psutil
import ray
from torch.distributed import TCPStore

from benchmarks.harness import results, runs
from benchmarks.harness.arguments import bench_parser
from benchmarks.harness.gpu_runs import TIMEOUTS, GpuRun, utilisation
from benchmarks.harness.worker_notes import WorkerNotes
from benchmarks.recovery.plain_loop import Gate, GatedLoss, PlainWorker
from elastic_ring import ElasticRingTrainer, RunConfig
from elastic_ring.cli import train
from elastic_ring.config import Timeouts, environment
from elastic_ring.monitor.metrics import JOURNAL_NAME
from elastic_ring.runtime.driver.cluster import worker_environment

LIMIT, GPU_LIMIT = 0.05, 0.005
COPIES_LIMIT, GPU_COPIES_LIMIT = 0.05, 0.01
LOSS_TOLERANCE = 1e-3
NEVER = 1_000_000
SETTLE_S = 0.2
ENDING_S, LEAST_STEPS = 60.0, 3
NUM_DRAWS = 4000
SIDES = ("product", "plain")
PATIENT = Timeouts(node_silent_s=300.0, coordinator_silent_s=300.0, lease_s=600.0, hello_s=120.0)


class Turns:
    """Decides which side runs: the server of both sides' gates."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.key = secrets.token_bytes(16)
        self._listener = Listener(("127.0.0.1", 0), backlog=16, authkey=self.key)
        self._connections: dict[str, list[Connection[Any, Any]]] = {side: [] for side in SIDES}

    def gate(self, side: str) -> Gate:
        address = self._listener.address
        assert isinstance(address, tuple)
        return Gate(address, self.key, side)

    def gather(self, sides: tuple[str, ...] = SIDES) -> None:
        """Wait until all ranks of `sides` have reached their gates for the first time."""
        while any(len(self._connections[side]) < self._num_ranks for side in sides):
            line = self._listener.accept()
            self._connections[line.recv()].append(line)

    def take(self, side: str) -> None:
        """Let one side train a block; returns when all its ranks are back at the gate."""
        for line in self._connections[side]:
            line.send("go")
        for line in self._connections[side]:
            line.recv()

    def release(self, side: str) -> None:
        for line in self._connections[side]:
            line.send("go")


@contextmanager
def product_stopped() -> Iterator[None]:
    """Stop every process of the product inside. The agent is first, so that it does not see the others stopped."""
    pids = [pid for kind in ("NodeAgent", "Coordinator", "Worker") for pid in runs.actor_pids(kind)]
    stopped = []
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
            stopped.append(pid)
        yield
    finally:
        for pid in reversed(stopped):
            os.kill(pid, signal.SIGCONT)


def gpu_run(arguments: argparse.Namespace) -> GpuRun:
    """Where both loops have their state on the same GPUs, of 8 B each has a quarter of a copy on each: one ring of
    four."""
    preset = arguments.model.removeprefix("gpu-")
    cp, dp = (4, 1) if preset == "8b" else (2, 2)
    cp, dp = arguments.cp or cp, arguments.dp or dp
    return GpuRun(preset, arguments.context, arguments.batch, cp, dp, kernel=arguments.kernel)


def trainer_of(model: str, folder: Path, arguments: argparse.Namespace, copies: str = "0") -> ElasticRingTrainer:
    """The product's run, its loss not gated yet."""
    trainer = _trainer_of(model, folder, arguments)
    trainer.run_config = replace(trainer.run_config, copies=copies, copy_every_steps=arguments.copy_every)
    return trainer


def _trainer_of(model: str, folder: Path, arguments: argparse.Namespace) -> ElasticRingTrainer:
    if model.startswith("gpu-"):
        trainer = gpu_run(arguments).trainer(folder, "bench-overhead", NEVER)
        patient = {name: max(getattr(PATIENT, name), value) for name, value in vars(TIMEOUTS).items()}
        timeouts = Timeouts(**{**patient, "boundary_s": 3600.0})
        trainer.run_config = RunConfig(
            "bench-overhead", run_dir=str(trainer.run_config.folder), timeouts=timeouts, progress=False
        )
        return trainer
    if model == "small":
        return runs.small_trainer(folder, "bench-overhead", steps=NEVER, check_model=False, timeouts=PATIENT)
    options = ["--preset", "laptop", "--faults", "none", "--steps", str(NEVER), "--run-dir", str(folder / "run")]
    trainer = train.build(train.parse(options))
    trainer.run_config = RunConfig("bench-overhead", run_dir=str(folder / "run"), timeouts=PATIENT, progress=False)
    trainer.task = _with(trainer.task, step=_with(trainer.task.step, check_model=False))
    return trainer


def _with(config: Any, **changes: Any) -> Any:
    return type(config)(**{**vars(config), **changes})


def alternate(
    turns: Turns, workers: list[Any], num_blocks: int, block_steps: int, run: runs.Watcher
) -> tuple[list[list[tuple[float, float]]], list[list[tuple[float, float]]]]:
    """(product, plain): for each block the (commit time, loss) of its steps."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    plain = [worker.run.remote(store.port, num_blocks, block_steps) for worker in workers]
    turns.gather()
    run.whole(1)
    for block in range(num_blocks):
        for side in SIDES if block % 2 else SIDES[::-1]:
            time.sleep(SETTLE_S)
            if side == "product":
                turns.take(side)
                continue
            with product_stopped():
                time.sleep(SETTLE_S)
                turns.take(side)
        results.show(f"  block {block + 1} of {num_blocks}")
    turns.release("plain")
    rows = ray.get(plain[0])
    num_steps = num_blocks * block_steps
    run.until("the last step's record", lambda: True if len(run.steps()) >= num_steps else None)
    ours = [(line["committed_monotonic_s"], line["loss"]) for line in run.steps()[:num_steps]]
    return _blocks(ours, block_steps), _blocks(rows, block_steps)


def _blocks(rows: list[tuple[float, float]], size: int) -> list[list[tuple[float, float]]]:
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def step_times(blocks: list[list[tuple[float, float]]]) -> np.ndarray:
    """(blocks, steps): commit to commit, without each block's first step and the first block."""
    return np.array([np.diff([at_s for at_s, _ in block]) for block in blocks[1:]])


def upper_bound(product: np.ndarray, plain: np.ndarray) -> float:
    """95th percentile of the ratio of medians under drawing pairs of blocks with replacement."""
    draws = np.random.default_rng(0).integers(len(plain), size=(NUM_DRAWS, len(plain)))
    ratios = [np.median(product[draw]) / np.median(plain[draw]) for draw in draws]
    return float(np.percentile(ratios, 95))


def one_after_another(
    turns: Turns, workers: list[Any], num_steps: int, trainer: ElasticRingTrainer
) -> tuple[list[list[tuple[float, float]]], list[list[tuple[float, float]]]]:
    """(product, plain): one block each, the product's once its standby is warm. The first step of each compiles and is
    left out later, as a pause is. Raises what a plain rank raised."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    plain = [worker.run.remote(store.port, 1, num_steps) for worker in workers]
    rows = ray.get(plain)[0]
    processes = [psutil.Process(pid) for pid in ray.get([worker.pid.remote() for worker in workers])]
    for worker in workers:
        ray.kill(worker)
    # A GPU's memory is free when the process that held it is gone.
    _, alive = psutil.wait_procs(processes, timeout=ENDING_S)
    if alive:
        raise runs.WatchFailed(f"processes of the plain loop have not ended within {ENDING_S:.0f} s: {alive}")
    results.show("  the plain loop is done")

    return [product_alone(turns, num_steps, trainer)], [rows]


def product_alone(turns: Turns, num_steps: int, trainer: ElasticRingTrainer) -> list[tuple[float, float]]:
    """(commit time, loss) of the product's steps, from the moment its standby is warm."""

    def watch(run: runs.Watcher) -> list[tuple[float, float]]:
        run.whole(1)
        turns.gather(("product",))
        turns.release("product")
        run.until("the last step", lambda: True if len(run.steps()) >= num_steps else None, timeout_s=900.0)
        return [(line["committed_monotonic_s"], line["loss"]) for line in run.steps()[:num_steps]]

    return runs.train_while(trainer, watch)


def cost_of_copies(without: dict[str, Any], with_them: dict[str, Any]) -> dict[str, Any]:
    """The ratio of the means' overheads, and its 95th percentile under drawing pairs of blocks with replacement."""
    sides = [(np.array(one["product_s"]), np.array(one["plain_s"])) for one in (without, with_them)]
    draws = [
        np.random.default_rng(seed).integers(len(plain), size=(NUM_DRAWS, len(plain)))
        for seed, (_, plain) in enumerate(sides)
    ]
    before, after = (
        np.array([product[draw].mean() / plain[draw].mean() for draw in drawn])
        for drawn, (product, plain) in zip(draws, sides, strict=True)
    )
    overheads = [float(product.mean() / plain.mean()) for product, plain in sides]
    return {
        "overhead_without": overheads[0],
        "overhead_with": overheads[1],
        "cost": overheads[1] / overheads[0],
        "cost_upper_bound": float(np.percentile(after / before, 95)),
    }


def measure_alone(arguments: argparse.Namespace, copies: str, in_turns: int = 0) -> dict[str, Any]:
    """The product's steps without the plain loop; the first, which compiles, is left out."""
    with runs.scratch() as folder, runs.local_ray(num_cpus=32 if arguments.model.startswith("gpu-") else 8):
        trainer = trainer_of(arguments.model, folder, arguments, copies)
        turns = Turns(trainer.scaling_config.mesh.size)
        notes = WorkerNotes(folder / "notes", arguments.slow_s, copies_in_turns=in_turns)
        repeats = trainer.scaling_config.mesh.dp > 1
        loss = GatedLoss(trainer.task.loss, turns.gate("product"), NEVER, notes, repeats=repeats)
        trainer.task = _with(trainer.task, loss=loss)
        rows = product_alone(turns, arguments.block_steps, trainer)
        steps_s = np.diff([at_s for at_s, _ in rows])
        results.show(
            f"  copies={copies}: median {np.median(steps_s):.4f} s, mean {steps_s.mean():.4f} s, longest "
            f"{steps_s.max():.4f} s of {len(steps_s)} steps"
        )
        return {
            "steps_s": steps_s.tolist(),
            "losses": [loss for _, loss in rows],
            "copies": notes.copies(),
            "stacks": notes.stacks(),
            "checkpoints": checkpoints_of(trainer),
        }


def measure_apart(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """One run without copies and one with; the second step, in which memory is pinned, is left out, too."""
    figures = {copies: measure_alone(arguments, copies) for copies in ("0", arguments.copies)}
    return {copies: {**one, "steps_s": one["steps_s"][1:]} for copies, one in figures.items()}


def measure_in_turns(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """One run: steps without copies beside them, and with. The first two turns, in which memory is pinned, are left
    out."""
    num = arguments.in_turns
    found = measure_alone(arguments, arguments.copies, num)
    # What is taken after `applied` steps is sent beside the next.
    late = [(applied // num % 2, step_s) for applied, step_s in enumerate(found["steps_s"], 1) if applied >= 2 * num]
    without, with_them = ([step_s for turn, step_s in late if turn == which] for which in (1, 0))
    return {"0": {**found, "steps_s": without, "copies": []}, arguments.copies: {**found, "steps_s": with_them}}


def cost_apart(without: dict[str, Any], with_them: dict[str, Any]) -> dict[str, Any]:
    """The ratio of both runs' mean steps, and its 95th percentile under drawing steps with replacement."""
    sides = [np.array(one["steps_s"]) for one in (without, with_them)]
    before, after = (
        steps[np.random.default_rng(seed).integers(len(steps), size=(NUM_DRAWS, len(steps)))].mean(axis=1)
        for seed, steps in enumerate(sides)
    )
    return {
        "cost": float(sides[1].mean() / sides[0].mean()),
        "cost_of_medians": float(np.median(sides[1]) / np.median(sides[0])),
        "cost_upper_bound": float(np.percentile(after / before, 95)),
    }


def measure(arguments: argparse.Namespace, copies: str = "0") -> dict[str, Any]:
    model, num_blocks, block_steps = arguments.model, arguments.blocks, arguments.block_steps
    with runs.scratch() as folder, runs.local_ray(num_cpus=32 if model.startswith("gpu-") else 8):
        trainer = trainer_of(model, folder, arguments, copies)
        task, mesh = trainer.task, trainer.scaling_config.mesh
        turns = Turns(mesh.size)
        device = trainer.scaling_config.device
        variables = worker_environment(device, {}, environment(), {})  # as the product's workers have
        actor = ray.remote(PlainWorker).options(num_cpus=0, runtime_env={"env_vars": variables} if variables else None)
        gate = None if arguments.apart else turns.gate("plain")
        workers = [actor.remote(task, mesh, rank, gate, device) for rank in range(mesh.size)]
        sequences_per_block = NEVER if arguments.apart else block_steps * task.step.global_batch // mesh.dp
        notes = WorkerNotes(folder / "notes", arguments.slow_s)
        loss = GatedLoss(task.loss, turns.gate("product"), sequences_per_block, notes, repeats=mesh.dp > 1)
        trainer.task = _with(task, loss=loss)
        if arguments.apart:
            ours, theirs = one_after_another(turns, workers, block_steps, trainer)
            product, plain = (np.array([np.diff([at_s for at_s, _ in rows[0]])]) for rows in (ours, theirs))
        else:
            action = partial(alternate, turns, workers, num_blocks, block_steps)
            ours, theirs = runs.train_while(trainer, action)
            product, plain = step_times(ours), step_times(theirs)
        beside = {"copies": notes.copies(), "stacks": notes.stacks(), "checkpoints": checkpoints_of(trainer)}
    return {**_figures(arguments, product, plain, (ours[0], theirs[0])), **beside}


def checkpoints_of(trainer: ElasticRingTrainer) -> list[dict[str, Any]]:
    """What was saved beside the steps."""
    lines = map(json.loads, (trainer.run_config.folder / JOURNAL_NAME).read_text().splitlines())
    return [line["checkpoint"] for line in lines if line.get("note") == "checkpoint"]


def _figures(
    arguments: argparse.Namespace,
    product: np.ndarray,
    plain: np.ndarray,
    first: tuple[list[tuple[float, float]], list[tuple[float, float]]],
) -> dict[str, Any]:
    model, used = arguments.model, {}
    if model.startswith("gpu-"):
        run = gpu_run(arguments)
        model = f"{model} at {arguments.context} tokens on {run.dp} x {run.cp} GPUs"
        used = {
            "mfu_product": utilisation(run, float(np.median(product))),
            "mfu_plain": utilisation(run, float(np.median(plain))),
        }
    pairs = zip([x for _, x in first[0]], [x for _, x in first[1]], strict=True)
    return {
        "model": model if used else f"{model} model",
        "apart": arguments.apart,
        "blocks": 1 if arguments.apart else arguments.blocks,
        "steps_per_block": arguments.block_steps,
        "product_s": product.tolist(),
        "plain_s": plain.tolist(),
        "median_product_s": float(np.median(product)),
        "median_plain_s": float(np.median(plain)),
        "mean_product_s": float(product.mean()),
        "mean_plain_s": float(plain.mean()),
        **used,
        "ratio": float(np.median(product) / np.median(plain)),
        "upper_bound": None if arguments.apart else upper_bound(product, plain),
        "worst_loss_error": max(abs(a - b) / abs(b) for a, b in pairs),
    }


def report(figures: dict[str, Any], limit: float) -> tuple[str, list[str]]:
    rows = [[side, *(1e3 * figures[f"{what}_{side}_s"] for what in ("median", "mean"))] for side in SIDES]
    ratio, bound = f"{100 * (figures['ratio'] - 1):+.2f} %", figures["upper_bound"]
    told = f"95 % upper bound {100 * (bound - 1):+.2f} % (limit {100 * limit:g} %)" if bound else "one after the other"
    blocks = "one block" if bound is None else f"{figures['blocks'] - 1} pairs of blocks"
    mean = 100 * (figures["mean_product_s"] / figures["mean_plain_s"] - 1)
    text = (
        f"{figures['model']}, {blocks} of {figures['steps_per_block']} steps\n"
        + results.table(["step", "median ms", "mean ms"], rows)
        + f"\noverhead {ratio}, {told}; of the means {mean:+.2f} %"
        + f"\nlosses of the first block agree to {figures['worst_loss_error']:.1e} relative"
    )
    if "mfu_product" in figures:
        text += (
            f"\nmodel FLOPs utilisation {100 * figures['mfu_product']:.1f} % with the machinery,"
            f" {100 * figures['mfu_plain']:.1f} % without"
        )
    missed = []
    if bound is not None and bound - 1 > limit:
        missed.append(f"the upper bound is {100 * (bound - 1):+.2f} %, more than {100 * limit:g} %")
    if figures["worst_loss_error"] > LOSS_TOLERANCE:
        missed.append(f"the losses differ by {figures['worst_loss_error']:.1e}: not the same work was compared")
    return text, missed


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--blocks", type=int, default=12, help="pairs of blocks, the first of which is left out")
    parser.add_argument("--block-steps", type=int, default=20)
    parser.add_argument("--model", choices=["laptop", "small", "gpu-100m", "gpu-1b", "gpu-8b"], default="laptop")
    parser.add_argument("--context", type=int, default=32_768, help="tokens of a sequence (gpu-*)")
    parser.add_argument("--batch", type=int, default=2, help="sequences of a step (gpu-*)")
    parser.add_argument("--kernel", default="", help="pin one attention kernel (gpu-*)")
    parser.add_argument("--dp", type=int, default=0, help="rings (gpu-*; 0: as above)")
    parser.add_argument("--cp", type=int, default=0, help="ranks of a ring (gpu-*; 0: as above)")
    parser.add_argument("--apart", action="store_true", help="one block of each, one after the other; no --blocks")
    parser.add_argument("--in-turns", type=int, default=0, metavar="N", help="with --copies: one run, N steps of each")
    parser.add_argument("--copies", default="0", help="copies in peers' memory: 1, 2 or parity:G")
    parser.add_argument("--copy-every", type=int, default=10, help="steps between copies")
    parser.add_argument("--slow-s", type=float, default=10.0, help="seconds after which a step's stacks are kept")
    parser.add_argument("--save", action="store_true", help="write the table and a JSON into benchmarks/results/")
    arguments = parser.parse_args()
    if (arguments.dp or arguments.cp) and not arguments.model.startswith("gpu-"):
        parser.error(f"--dp and --cp are for gpu-*: --model {arguments.model} has its own mesh")
    if arguments.apart and arguments.block_steps < LEAST_STEPS:
        parser.error(f"--block-steps {arguments.block_steps}: --apart leaves the first out, give {LEAST_STEPS} or more")
    if (num := arguments.in_turns) and (arguments.copies == "0" or num % arguments.copy_every):
        parser.error(f"--in-turns {num}: needs --copies, and whole rounds of them: a multiple of --copy-every")
    if num and arguments.block_steps < 5 * num:
        parser.error(f"--block-steps {arguments.block_steps}: --in-turns {num} leaves {2 * num} out; give {5 * num}")
    if arguments.copies != "0":
        return _measure_copies(arguments)
    figures = measure(arguments)
    text, missed = report(figures, GPU_LIMIT if arguments.model.startswith("gpu-") else LIMIT)
    held = "the losses hold, and no other bound was tried" if arguments.apart else "all bounds hold"
    text += "\n" + results.verdict(missed, held)
    results.show("\n" + text)
    if arguments.save:
        name = "bench_overhead" if arguments.model == "laptop" else f"bench_overhead-{arguments.model}"
        if arguments.model.startswith("gpu-"):
            run = gpu_run(arguments)
            name += f"-{run.dp}x{run.cp}"
        results.save("training", name, text, {**figures, "missed": missed})
    return 1 if missed else 0


def _measure_copies(arguments: argparse.Namespace) -> int:
    costs = cost_apart if arguments.apart or arguments.in_turns else cost_of_copies
    if arguments.in_turns:
        figures = measure_in_turns(arguments)
    elif arguments.apart:
        figures = measure_apart(arguments)
    else:
        figures = {copies: measure(arguments, copies) for copies in ("0", arguments.copies)}
    limit = GPU_COPIES_LIMIT if arguments.model.startswith("gpu-") else COPIES_LIMIT
    cost = costs(figures["0"], figures[arguments.copies])
    text, missed = report_copies(cost, limit, arguments, figures[arguments.copies]["copies"])
    if arguments.apart:
        same = figures["0"]["losses"] == figures[arguments.copies]["losses"]
        missed += [] if same else ["the losses of both runs differ: copies changed a bit"]
    elif (
        not arguments.in_turns and (error := max(one["worst_loss_error"] for one in figures.values())) > LOSS_TOLERANCE
    ):
        missed.append(f"the losses differ by {error:.1e}: not the same work was compared")
    text += "\n" + results.verdict(missed, "all bounds hold")
    results.show("\n" + text)
    if arguments.save:
        name = (
            f"bench_overhead-{arguments.model}-copies-{arguments.copies.replace(':', '-')}-every-{arguments.copy_every}"
        )
        results.save("checkpoint", name, text, {**cost, "runs": figures, "missed": missed})
    return 1 if missed else 0


def told_copies(rounds: list[dict[str, Any]]) -> Iterator[str]:
    """What the copies themselves took, in two lines."""
    done = [one for one in rounds if "total_s" in one]
    if done:
        totals, blocked = ([one[name] for one in done] for name in ("total_s", "blocked_s"))
        yield (
            f"{len(done)} snapshots of {done[-1]['bytes'] / 1e9:.2f} GB copied, median {np.median(totals):.2f} s, "
            f"longest {max(totals):.2f} s; training waited {1e3 * np.median(blocked):.1f} ms, at most "
            f"{1e3 * max(blocked):.0f} ms"
        )
    yield f"{sum(one['said'].startswith('no copies') for one in rounds)} times a rank left a round out"


def report_copies(
    cost: dict[str, Any], limit: float, arguments: argparse.Namespace, rounds: list[dict[str, Any]]
) -> tuple[str, list[str]]:
    asked = f"{arguments.model}, copies={arguments.copies} every {arguments.copy_every} step(s), "
    if "overhead_with" in cost:
        how = (
            f"{arguments.blocks - 1} pairs of blocks of {arguments.block_steps} steps, means\n"
            f"overhead without copies {100 * (cost['overhead_without'] - 1):+.2f} %, with them "
            f"{100 * (cost['overhead_with'] - 1):+.2f} %"
        )
    elif arguments.in_turns:
        how = (
            f"one run of {arguments.block_steps} steps, {arguments.in_turns} with and {arguments.in_turns} without in"
            f" turns\nratio of medians {100 * (cost['cost_of_medians'] - 1):+.2f} %, of means as follows"
        )
    else:
        how = (
            f"{arguments.block_steps - 2} steps without and with, one run after the other\n"
            f"ratio of medians {100 * (cost['cost_of_medians'] - 1):+.2f} %, of means as follows"
        )
    text = (
        f"{asked}{how}\ncopies cost {100 * (cost['cost'] - 1):+.2f} %, 95 % upper bound "
        f"{100 * (cost['cost_upper_bound'] - 1):+.2f} % (limit {100 * limit:g} %)"
    )
    text += "".join("\n" + line for line in told_copies(rounds))
    missed = []
    if cost["cost_upper_bound"] - 1 > limit:
        missed.append(f"the upper bound is {100 * (cost['cost_upper_bound'] - 1):+.2f} %, more than {100 * limit:g} %")
    return text, missed


if __name__ == "__main__":
    sys.exit(main())
