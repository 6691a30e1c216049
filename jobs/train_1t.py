"""Train a decoder on real text over elastic rings: the main job, from a laptop to a cluster.

    python jobs/train_1t.py --preset laptop
    ray job submit --working-dir . -- python jobs/train_1t.py --preset laptop --run-name demo

By default it kills one of its own workers on the way, to show what happens; `--faults none` turns that off.
Exits 0 when the run is complete (also when it was complete before), 1 when it failed, 2 for a wrong setting.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run from a checkout, where jobs is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from elastic_ring import ElasticRingTrainer, OptimConfig, RunConfig, ScalingConfig, StepConfig
from elastic_ring.attention.layers import LayerPatterns
from elastic_ring.attention.spec import read_pattern
from elastic_ring.data.source import SourceConfig, StdlibText, TextFiles, TokenShards
from elastic_ring.errors import ElasticRingError
from elastic_ring.faults import parse_faults
from elastic_ring.model.config import ModelConfig, num_parameters, preset
from elastic_ring.model.init import Initialiser
from elastic_ring.model.transformer import Transformer
from elastic_ring.train.layouts import Layouts
from jobs.model_plan import plan_of


@dataclass(frozen=True)
class Preset:
    """What a preset fixes unless an option says otherwise."""

    model: ModelConfig
    scaling: ScalingConfig
    step: StepConfig
    optim: OptimConfig
    faults: str


def laptop() -> Preset:
    """Two rings of two CPU ranks and a spare, a 1 M-parameter byte-level decoder: minutes on two cores."""
    return Preset(
        dataclasses.replace(preset("laptop"), checkpoint_activations=False),
        ScalingConfig(dp=2, cp=2, spares=1, resources_per_worker={"CPU": 0.25}),
        StepConfig(steps=60, global_batch=4, context_tokens=2048),
        OptimConfig(peak_lr=3e-3, min_lr=3e-4, warmup_steps=10, total_steps=60),
        "kill@step=21,phase=backward,rank=3",
    )


def on_gpus(name: str, cp: int, dp: int, context_tokens: int) -> Preset:
    """bfloat16 over fp32 master shards; one sequence for each ring and step. Every worker takes one GPU."""
    return Preset(
        preset(name),
        ScalingConfig(dp=dp, cp=cp, spares=1, device="cuda", resources_per_worker={"CPU": 1.0}),
        StepConfig(
            steps=1000, global_batch=dp, context_tokens=context_tokens, param_dtype="bfloat16", check_model=False
        ),
        OptimConfig(peak_lr=3e-4, min_lr=3e-5, warmup_steps=100, total_steps=1000),
        "none",
    )  # fmt: skip


PRESETS: dict[str, Callable[[], Preset]] = {
    "laptop": laptop,
    "100m": partial(on_gpus, "100m", 2, 2, 32_768),
    "1b": partial(on_gpus, "1b", 2, 2, 131_072),
    "8b": partial(on_gpus, "8b", 2, 2, 131_072),
    "70b": partial(on_gpus, "70b", 32, 2, 524_288),
    "1t": partial(on_gpus, "1t", 512, 2, 1_048_576),
}


NUMBERS = {
    "dp": "rings side by side", "cp": "ranks of a ring, over which a sequence is split",
    "spares": "warm workers that wait to take a dead one's place", "max-dp": "the mesh grows to so many rings",
    "min-dp": "and shrinks to so few", "steps": "to train", "seed": "of the first values and the order of samples",
    "global-batch": "sequences a step", "context": "tokens of a sequence",
    "val-every": "steps between validations, 0 for none",
}  # fmt: skip


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="laptop", choices=list(PRESETS), help="model, mesh and steps (laptop)")
    for name, says in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{says}; default: the preset's")
    parser.add_argument("--faults", help="a schedule of planned faults, or none; kill@step=21,phase=backward,rank=3")
    parser.add_argument("--data", help="text files (path, directory or glob), or shards:URI; default: Python's library")
    parser.add_argument(
        "--align-tokens", type=int, default=1, help="fill documents up to multiples of this; 128 for --pattern on GPUs"
    )
    parser.add_argument(
        "--layout", choices=["zigzag", "contiguous", "auto"],
        help="how a ring splits a sequence (zigzag); auto: as suits the pattern",
    )  # fmt: skip
    parser.add_argument("--machine", help="figures that --layout auto prices with: a file of jobs/calibrate.py")
    parser.add_argument(
        "--pattern", help="which keys attention keeps: a JSON file, or sinks:64+window:512;dense@3, or"
        " topk:8, blocks chosen by content; default: all"
    )
    parser.add_argument("--cpus-per-worker", type=float, help="of Ray's CPUs, which are a count and no limit")
    parser.add_argument("--kernel", help="pin one attention kernel instead of the best that passes its test")
    parser.add_argument(
        "--offload-activations", action="store_true", help="what checkpointing keeps waits in the host's memory"
    )
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile fuses what a layer computes around attention"
    )
    parser.add_argument("--plan", action="store_true", help="print what the run needs, and start nothing")
    parser.add_argument("--run-name", help="one name, one run: the same again follows it or goes on (train-1t-PRESET)")
    parser.add_argument("--run-dir", help="for its records; every node must see it (runs/RUN_NAME)")
    return parser.parse_args(argv)


def model_of(args: argparse.Namespace) -> ModelConfig:
    model = PRESETS[args.preset]().model
    return dataclasses.replace(
        model, offload_activations=model.offload_activations or args.offload_activations,
        compile_blocks=model.compile_blocks or args.compile,
    )  # fmt: skip


def build(args: argparse.Namespace) -> ElasticRingTrainer:
    """The trainer that the options describe. Raises ValueError for what cannot work."""
    base = PRESETS[args.preset]()
    step = _changed(
        base.step, steps=args.steps, seed=args.seed, global_batch=args.global_batch, context_tokens=args.context,
        layout=args.layout, val_every_steps=args.val_every, kernel=args.kernel,
    )  # fmt: skip
    cpus = None if args.cpus_per_worker is None else {"CPU": args.cpus_per_worker}
    scaling = _changed(
        base.scaling, dp=args.dp, cp=args.cp, spares=args.spares, max_dp=args.max_dp, min_dp=args.min_dp,
        resources_per_worker=cpus,
    )  # fmt: skip
    warmup = min(base.optim.warmup_steps, step.steps)
    optim = _changed(base.optim, total_steps=step.steps, warmup_steps=warmup)
    faults = parse_faults(base.faults if args.faults is None else args.faults)
    if args.faults is None:
        faults = tuple(f for f in faults if f.step < step.steps and (f.rank or 0) < scaling.mesh.size)
    name = args.run_name or f"train-1t-{args.preset}"
    run = RunConfig(name=name, run_dir=args.run_dir or f"runs/{name}", faults=faults)
    model = model_of(args)
    logging.info("%s parameters, mesh %s, %d spare(s)", f"{num_parameters(model):,}", scaling.mesh, scaling.spares)
    return ElasticRingTrainer(
        partial(Transformer, model), _data(args, step.context_tokens), step=step, optim=optim, scaling=scaling,
        run=run, initial=Initialiser(step.seed, model.num_layers), pattern=_pattern(args.pattern, model, step),
        machine=args.machine,
    )  # fmt: skip


def _pattern(text: str | None, model: ModelConfig, step: StepConfig) -> LayerPatterns | None:
    if text is None:
        return None
    try:
        pattern = read_pattern(text)
        pattern.check(model.num_layers, model.num_heads, model.num_kv_heads)
    except ValueError as error:
        raise ValueError(f"--pattern: {error}") from error
    density = pattern.density(step.context_tokens, model.num_layers, model.num_heads, model.num_kv_heads)
    most = "at most " if pattern.density_is_bound else ""
    logging.info(
        "attention: %s; density %s%.3f of a document of %d tokens", pattern, most, density, step.context_tokens
    )
    return pattern


def _data(args: argparse.Namespace, context_tokens: int) -> SourceConfig:
    text, align_tokens = args.data, args.align_tokens
    if text is None:
        return StdlibText(context_tokens, align_tokens)
    if text.startswith("shards:"):
        return TokenShards(context_tokens, text.removeprefix("shards:"), align_tokens=align_tokens)
    return TextFiles(context_tokens, (text,), align_tokens)


def _changed(config: Any, **changes: object) -> Any:
    return dataclasses.replace(config, **{k: v for k, v in changes.items() if v is not None})


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        args = parse(argv)
        trainer = build(args)
        if args.plan:
            Layouts(trainer.task).choice(trainer.scaling.cp, trainer.scaling.device)  # says what "auto" comes to
            print("\n".join(plan_of(model_of(args), trainer.scaling, trainer.task.step).lines()))
            return 0
        result = trainer.fit()
    except ValueError as error:
        print(f"train_1t: {error}", file=sys.stderr)
        return 2
    except ElasticRingError as error:
        print(f"train_1t: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print(f"train_1t: {str(interrupt) or 'stopped before training began'}", file=sys.stderr)
        return 130
    summary = result.summary
    first, last = (float.fromhex(summary["losses"][i]) for i in (0, -1))
    print(
        f"{summary['steps']} steps, loss {first:.3f} -> {last:.3f}, {len(summary['recoveries'])} "
        f"{'recovery' if len(summary['recoveries']) == 1 else 'recoveries'}, "
        f"goodput {summary['goodput']:.0%}, {'bit-exact' if summary['exact'] else 'sample-exact'}\n"
        f"weights {summary['weights_sha256'][:16]}, samples {summary['samples_sha256'][:16]}; all of it in "
        f"{Path(result.run_dir)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
