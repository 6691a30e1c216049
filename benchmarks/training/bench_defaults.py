"""What a run takes without a flag on one GPU, beside settings by hand: sequences of a pass, activations kept or not.

    python benchmarks/training/bench_defaults.py                    a Llama of 1.17 B at 512, 2 K and 8 K tokens
    python benchmarks/training/bench_defaults.py --cases lora-8k    one of 7.24 B with adapters on a folder's weights

Whole runs through the trainer; a step is the median of those after the fourth. `peak`: allocated, of `status`.
"""

from __future__ import annotations

import json
import logging
import shutil
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ in ("__main__", "__mp_main__"):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness import results
from benchmarks.harness.arguments import bench_parser, list_of
from benchmarks.harness.gpu_runs import HF, HF_LLAMA, TIMEOUTS, GpuRun, RandomTokens
from elastic_ring import CheckpointConfig, ElasticRingTrainer, OptimConfig, RunConfig, ScalingConfig, StepConfig
from elastic_ring.integrations.transformers import ring_model
from elastic_ring.monitor.json_files import read_json
from elastic_ring.monitor.metrics import SUMMARY_NAME, read_metrics
from elastic_ring.runtime.driver.ray_session import ray_session

SEVEN_B = HF_LLAMA | {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14_336}
SEVEN_B |= {"num_attention_heads": 32, "max_position_embeddings": 8192}
LORA = "r=16,alpha=32,target=all-linear"
CASES: dict[str, tuple[int, int, bool, list[tuple[Any, Any]]]] = {
    "2k": (2048, 16, False, [("auto", "auto"), (1, False), (1, True), (4, True), (16, True)]),
    "8k": (8192, 2, False, [("auto", "auto"), (1, False), (2, True)]),
    "512": (512, 64, False, [("auto", "auto"), (16, True), (64, True)]),
    "lora-8k": (8192, 2, True, [("auto", "auto"), (1, False), (2, True)]),
}
"""Tokens of a sequence, sequences of a step, with adapters, and (sequences_per_pass, keep_activations) of each run."""


def seven_b(folder: Path) -> Path:
    """A folder of random weights in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        made = LlamaForCausalLM(LlamaConfig(**{name: value for name, value in SEVEN_B.items() if name != "model_type"}))
        torch.set_default_dtype(torch.float32)
    made.save_pretrained(folder)
    del made
    torch.cuda.empty_cache()
    return folder


def measure(model: Any, folder: Path, case: str, settings: tuple[Any, Any], steps: int) -> list[object]:
    context, batch, adapts, _ = CASES[case]
    number, kept = settings
    name = f"{case}-{number}-{kept}"
    trainer = ElasticRingTrainer(
        model,
        RandomTokens(context, HF_LLAMA["vocab_size"]),
        step_config=StepConfig(
            steps=steps,
            global_batch=batch,
            context_tokens=context,
            param_dtype="bfloat16",
            check_model=False,
            sequences_per_pass=number,
        ),
        optim_config=OptimConfig(peak_lr=3e-4, min_lr=3e-5, warmup_steps=2, total_steps=steps),
        scaling_config=replace(SCALING, keep_activations=kept),
        run_config=RunConfig(
            name, run_dir=str(folder / name), progress=False, timeouts=TIMEOUTS, checkpoint_config=NONE
        ),
        initial=None if adapts else GpuRun(HF).trainer(folder, name, steps).task.initial,
    )
    found = trainer.fit()
    steps_s = [line["step_s"] for line in read_metrics(found.path) if "step_s" in line][4:]
    step_s = statistics.median(steps_s)
    summary = read_json(found.path / SUMMARY_NAME) or {}
    step, scaling = trainer.task.step, trainer.scaling_config
    chosen = f"{step.sequences_per_pass}, {'kept' if scaling.keep_activations else 'recomputed'}"
    peak_gib = round(summary.get("peak_gpu_bytes", 0) / 2**30, 1)
    shutil.rmtree(found.path)  # weights of each run would fill a small disk
    return [case, f"{number}, {kept}", chosen, step_s, context * batch / step_s, peak_gib, float(min(steps_s))]


NONE = CheckpointConfig(every_steps=0)
SCALING = ScalingConfig(dp=1, cp=1, spares=0, device="cuda", resources_per_worker={"CPU": 1.0})


def main(arguments: list[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--cases", type=list_of(str), default=["2k", "8k", "512"], help=f"some of {','.join(CASES)}")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--skip", type=int, default=0, help="of each case's settings, the first so many")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    rows = []
    with tempfile.TemporaryDirectory(dir=".") as made, ray_session(SCALING, 60.0):
        folder = Path(made).absolute()
        for case in options.cases:
            model = ring_model(seven_b(folder / "7b"), lora=LORA) if CASES[case][2] else ring_model(HF_LLAMA)
            for settings in CASES[case][3][options.skip :]:
                rows.append(measure(model, folder, case, settings, options.steps))
                results.show(json.dumps(rows[-1]))
    results.show(results.table(("case", "asked", "taken", "step_s", "tokens_a_s", "peak_gib", "least_s"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
