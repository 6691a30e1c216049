"""What a step costs the host: the product's own step on tensors so small that a device never sets the pace.

    python benchmarks/probes/probe_host_step.py                    on a CPU, in seconds of the process
    python benchmarks/probes/probe_host_step.py --device cuda      on one GPU, kernels of training, wall clock
    python benchmarks/probes/probe_host_step.py --profile          with the places where the host is most often

A ring of one, preset `1b`'s number of layers, nothing recomputed unless asked. Milliseconds of a step by part, the
least of all steps: the host is disturbed by other work, never helped. Microseconds of a layer, from two depths. `start`
is what comes before the model is called, `gap` from the vote's read of the device until the optimizer is launched: a
GPU is idle in it whatever the step's length. `loss` must stay what it was where a change is to keep the bits.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

if __name__ in ("__main__", "__mp_main__"):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.distributed import TCPStore

from benchmarks.harness import results
from benchmarks.harness.arguments import bench_parser, list_of
from benchmarks.harness.gpu_runs import GpuRun
from benchmarks.probes.gpu_steps import build, connected, synchronize
from elastic_ring.model.config import ModelConfig
from elastic_ring.runtime.gpu.device import be_deterministic, kernel_cache
from elastic_ring.runtime.groups import nccl
from elastic_ring.train.passes import compute
from elastic_ring.train.startup.layouts import attention_shapes
from elastic_ring.train.startup.warm import warm_up_device
from elastic_ring.train.transaction import Transaction
from elastic_ring.train.update import exchange_update

PARTS = ("start", "forward", "backward", "reduce", "vote", "apply")
SAMPLE_S = 0.0005


@dataclass(frozen=True)
class NarrowRun(GpuRun):
    """A preset's layers, a few columns wide."""

    width: int = 0
    head_dim: int = 0

    @property
    def model(self) -> ModelConfig:
        narrow = replace(super().model, width=self.width, ffn_width=2 * self.width, vocab_size=256)
        return replace(narrow, head_dim=self.head_dim, num_heads=4, num_kv_heads=2)


class Marks:
    """When the host reached each part of a step, by `now`."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.at: dict[str, float] = {}

    def __call__(self, phase: str, step: int = 0, hop: int | None = None) -> None:
        self.at.setdefault(phase, self._now())


def one_step(state: Transaction, marks: Marks) -> dict[str, float]:
    """Milliseconds of the host by part."""
    marks.at.clear()
    step, model = state.applied, state.model
    assert model is not None
    call = model.register_forward_pre_hook(lambda *_: marks("called"))
    marks("begun")
    local = compute(state, step)
    marks("computed")
    state.reduce(step)
    marks("reduced")
    synchronize(state.device)  # what the vote would wait for: the gap counts from here
    marks("ready")
    outcome = state.vote(step, local, boundary=False)
    marks("voted")
    exchange_update(state, outcome)
    state.apply(outcome)
    marks("applied")
    synchronize(state.device)
    call.remove()
    at = marks.at
    edges = ("begun", "called", "backward", "computed", "reduced", "voted", "applied")
    parts = {part: at[last] - at[first] for part, (first, last) in zip(PARTS, pairwise(edges), strict=True)}
    parts["vote"] -= at["ready"] - at["reduced"]
    spans = {name: 1e3 * span for name, span in parts.items()}
    return {**spans, "step": sum(spans.values()), "gap": 1e3 * (at["applied"] - at["ready"]), "loss": outcome.loss}


def measured(run: NarrowRun, device: torch.device, steps: int, profile: bool) -> dict[str, Any]:
    """The least of `steps` steps, by part; and with `profile` milliseconds of a step by place."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    groups = connected(run, 0, store.port, f"{run.num_layers}/1", device)
    marks = Marks(time.process_time if device.type == "cpu" else time.perf_counter)
    state = build(run, groups, device, marks)
    rows = [one_step(state, marks) for _ in range(steps)]
    found: dict[str, Any] = {name: min(row[name] for row in rows[3:]) for name in (*PARTS, "step", "gap")}
    found["loss"] = rows[-1]["loss"]
    if profile:
        found["places"] = places(lambda: one_step(state, marks), steps)
    return found


def places(step: Callable[[], object], steps: int) -> list[tuple[str, float]]:
    """Where the process's threads are during `steps` calls, in milliseconds of each: the innermost frame, with the
    innermost of the package where that is another. Threads that wait in a lock or a poll are left out."""
    seen: Counter[str] = Counter()
    over, begun = threading.Event(), time.perf_counter()
    sampler = threading.Thread(target=_sample, args=(seen, over))
    sampler.start()
    for _ in range(steps):
        step()
    over.set()
    sampler.join()
    each = 1e3 * (time.perf_counter() - begun) / steps / max(1, seen.pop("all"))
    return [(place, round(count * each, 2)) for place, count in seen.most_common(40)]


def _sample(seen: Counter[str], over: threading.Event) -> None:
    own = threading.get_ident()
    while not over.wait(SAMPLE_S):
        seen["all"] += 1
        for thread, frame in sys._current_frames().items():
            if thread != own and (place := _place(frame)):
                seen[place] += 1


def _place(frame: Any) -> str:
    names: list[str] = []
    while frame is not None and len(names) < 2:
        code = frame.f_code
        ours = "elastic_ring" in code.co_filename
        if not names or ours:
            names.append(f"{Path(code.co_filename).name}:{code.co_name}")
        if ours:
            break
        frame = frame.f_back
    idle = names[0].startswith(("threading.py", "thread.py", "selectors.py", "queue.py"))
    return "" if idle else " < ".join(names)


def main(argv: list[str]) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--layers", type=list_of(int), default=[22, 2], help="two depths")
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--checkpoint", action="store_true", help="recompute layers in backward")
    parser.add_argument("--document-tokens", type=int, default=0, help="packed documents of so many in the mean")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    asked = parser.parse_args(argv)
    device = torch.device(asked.device)
    width, head_dim = (256, 64) if device.type == "cuda" else (32, 8)  # GPUs' kernels take no fewer columns
    run = NarrowRun(
        "1b",
        context=asked.context,
        batch=1,
        cp=1,
        dp=1,
        checkpoint=asked.checkpoint,
        document_tokens=asked.document_tokens,
        width=width,
        head_dim=head_dim,
    )
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)  # its products of a few numbers take as long as a layer's Python
    if device.type == "cuda":
        os.environ.update(nccl.ENVIRONMENT)
        task = run.trainer(Path("/tmp"), "probe", 1000).task
        be_deterministic(task)
        warm_up_device(task, device, attention_shapes(task), 1, kernel_cache(), {})
    found = [measured(replace(run, num_layers=n), device, asked.steps, asked.profile) for n in asked.layers]
    deep, shallow = found
    names = (*PARTS, "step", "gap")
    apart = (asked.layers[0] - asked.layers[1]) / 1e3
    layer = {name: (deep[name] - shallow[name]) / apart for name in names}
    head = ("", *names, "loss")
    rows = [
        [f"ms, {n} layers", *(row[name] for name in names), row["loss"]]
        for n, row in zip(asked.layers, found, strict=True)
    ]
    results.show(results.table(head, [*rows, ["us a layer", *(layer[name] for name in names), None]]))
    for place, spent_ms in deep.get("places", ()):
        results.show(f"{spent_ms:8.2f} ms  {place}")
    results.write_json(asked.out, {"layers": asked.layers, "rows": found, "us_a_layer": layer})
    print(json.dumps({"loss": deep["loss"]}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
