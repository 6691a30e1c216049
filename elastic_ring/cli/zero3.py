"""Train with DeepSpeed ZeRO-3 in Ray Train: for who needs offloading, or already runs Ray Train or DeepSpeed.

    python jobs/train_zero3.py --preset laptop --workers 2 --cp 2
    python jobs/train_zero3.py --preset laptop --workers 2:4 --cp 2 --offload-optimizer cpu

Model, data, step and optimizer have the flags and files of `elastic-ring train`. Exits as that does.
torch and Ray are imported once the settings are known to be right.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_ring.cli import plain_terminal, refused
from elastic_ring.cli.settings import PRESETS, SECTIONS, SHORT, TrainSettings, has_flag, parse
from elastic_ring.config import RunConfig, StepConfig
from elastic_ring.errors import ElasticRingError
from elastic_ring.train.guard_table import ZERO3, reason

if TYPE_CHECKING:
    from elastic_ring.integrations.ray_train import Zero3Trainer

PLACES = ("none", "cpu", "nvme")
# Settings of the elastic ring that mean nothing here, and what to use; of guards `guard_table` has the reasons.
INSTEAD = {
    "scaling.dp": "it follows from --workers and --cp",
    "scaling.spares": "Ray Train starts lost workers again",
    "scaling.cp": "give --cp",
    "scaling.cpu_offload": "give --offload-optimizer and --offload-param",
    "scaling.min_dp": "give --workers MIN:MAX",
    "scaling.max_dp": "give --workers MIN:MAX",
    "run.faults": "kill a process; this door plans no faults",
    "run.resume": "Ray Train resumes by the run's name",
    "run.run_dir": "Ray Train's folder is --storage-path/--run-name",
    "run.checkpoint_config": "give --checkpoint-every-steps; the newest two are kept",
    "run.copies": "a worker group starts anew from a checkpoint",
    "run.rollback_limit": "loss spikes lead to no going back",
    "run.skip_batches": "no batch is left out",
    "step.val_every_steps": "this door does not validate",
    "step.val_every_tokens": "this door does not validate",
}
NONE_HERE = "this door has nothing of the kind; leave it out"
OBEYED = {
    "scaling": {"device", "resources_per_worker"},
    "run": {"name", "storage_path", "loss_spike", "loss_spike_actions"},
}

IGNORED = [
    "step.val_every_steps",
    "step.val_every_tokens",
    *(
        f"{section}.{name}"
        for section, obeyed in OBEYED.items()
        for name in SECTIONS[section].__pydantic_fields__
        if name not in obeyed
    ),
]
"""The settings of the elastic ring that this door does not obey."""


def parse_zero3(argv: Sequence[str]) -> tuple[argparse.Namespace, TrainSettings]:
    """This door's own flags, and the settings that it shares. Raises ValueError for settings that contradict each other
    and for those that this door would not obey."""
    own = argparse.ArgumentParser(
        prog="train_zero3",
        add_help=False,
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Beside these the settings of `elastic-ring train`, --preset, --steps, --data, --pattern, "
        "--model-folder, --run-name, --storage-path and all that have a dot: see its --help.",
    )
    own.add_argument("--help", "-h", action="help", help="show this and exit")
    own.add_argument("--workers", default="2", metavar="N|MIN:MAX", help="Ray Train's workers (2)")
    own.add_argument("--cp", type=int, default=2, help="workers of a ring, over which a sequence is split (2)")
    own.add_argument("--offload-optimizer", choices=PLACES, default="none", help="moments and fp32 masters (none)")
    own.add_argument("--offload-param", choices=PLACES, default="none", help="parameters (none)")
    own.add_argument("--nvme-path", default="", help="a folder on a local disk of every node, for nvme")
    own.add_argument("--deepspeed-config", type=Path, help="a JSON file with more of DeepSpeed's configuration")
    own.add_argument("--checkpoint-every-steps", type=int, default=10, help="0 for one at the end only (10)")
    own.add_argument("--max-failures", type=int, default=3, help="restarts by Ray Train (3)")
    options, rest = own.parse_known_args(argv)
    for setting in IGNORED:
        for flag in (setting, *(short for short, long in SHORT.items() if f"{long}.".startswith(f"{setting}."))):
            if has_flag(rest, flag) or any(
                word.replace("_", "-").startswith(f"--{flag}.".replace("_", "-")) for word in rest
            ):
                raise ValueError(f"--{flag.replace('_', '-')}: is the elastic ring's; here {_instead(setting)}")
    for flag in ("validate", "stop_early", "keep_best", "search", "extend"):
        if has_flag(rest, flag):
            raise ValueError(f"--{flag.replace('_', '-')}: is the elastic ring's; here {NONE_HERE}")
    settings = parse(rest)
    for name in ("validate", "stop_early", "keep_best", "search"):
        if (value := getattr(settings, name)) is not None:
            raise ValueError(f"{name}={value!r}: is the elastic ring's; here {NONE_HERE}")
    usual = {"run": RunConfig(), "step": StepConfig(), "scaling": PRESETS[settings.preset]()["scaling"]}
    for setting in IGNORED:
        section, name = setting.split(".")
        value = getattr(getattr(settings, section), name)
        if value != getattr(usual[section], name):
            raise ValueError(f"{setting}={value!r}: is the elastic ring's; here {_instead(setting)}")
    return options, settings


def _instead(setting: str) -> str:
    why = reason(ZERO3, setting.partition(".")[2])
    return INSTEAD.get(setting) or (f"this door has no such guard: {why}" if why else NONE_HERE)


def workers_of(text: str) -> tuple[int, int]:
    """(fewest, most) of N or MIN:MAX. Raises ValueError for another text."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if match is None:
        raise ValueError(f"workers={text!r}: must be a number, or MIN:MAX")
    return int(match[1]), int(match[2] or match[1])


def build(own: argparse.Namespace, settings: TrainSettings) -> Zero3Trainer:
    """The trainer that the settings describe. Raises ValueError for settings that cannot work."""
    from elastic_ring.cli.train import build as build_elastic
    from elastic_ring.integrations.ray_train import Zero3Config, Zero3Trainer
    from elastic_ring.integrations.ray_train.settings import read_deepspeed
    from elastic_ring.integrations.ray_train.trainer import run_config, scaling_config

    base = build_elastic(settings)
    use_gpu = settings.scaling.device == "cuda"
    zero = Zero3Config(
        offload_optimizer=own.offload_optimizer,
        offload_param=own.offload_param,
        nvme_path=own.nvme_path,
        checkpoint_every_steps=own.checkpoint_every_steps,
        loss_spike=settings.run.loss_spike,
        loss_spike_actions=settings.run.loss_spike_actions,  # type: ignore[arg-type]
        deepspeed={} if own.deepspeed_config is None else read_deepspeed(own.deepspeed_config),
    )
    trainer = Zero3Trainer(
        base.task.model,
        base.task.data,
        cp=own.cp,
        zero=zero,
        step_config=settings.step,
        optim_config=base.task.optim,
        initial=base.task.initial,
        pattern=base.task.pattern,
        loss=base.task.loss,
        cost_model=base.task.cost_model,
        scaling_config=scaling_config(workers_of(own.workers), settings.scaling.resources_per_worker, use_gpu=use_gpu),
        run_config=run_config(settings.run.name, settings.run.storage_path, own.max_failures),
    )
    trainer.config_files.update(base.config_files)
    return trainer


def main(argv: Sequence[str] | None = None) -> int:
    with plain_terminal():
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        try:
            own, settings = parse_zero3(sys.argv[1:] if argv is None else argv)
            result = build(own, settings).fit()
        except (ValueError, ElasticRingError, KeyboardInterrupt) as error:
            return refused("train_zero3", error)
        summary = result.summary
        first, last = (float.fromhex(summary["losses"][i]) for i in (0, -1))
        print(
            f"{summary['steps']} steps, loss {first:.3f} -> {last:.3f}, {len(summary['generations'])} worker group(s), "
            f"goodput {summary['goodput']:.0%}\n"
            f"weights {summary['weights_sha256'][:16]}, samples {(summary['samples_sha256'] or 'unknown')[:16]}; all "
            f"of it in {settings.run.storage_uri}"
        )
        return 0
