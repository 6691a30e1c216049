"""Search sparse patterns for your model and data: the best trade between loss, time of a step and bytes on the wire.

    elastic-ring tune --out first --model-folder F --data D --device cuda --context 8192 --steps 200 --from runs/dense
    ray job submit --working-dir . -- python tune/search_patterns.py --address auto --out /shared/first ...

Model (`--preset`, `--model-folder`), data, step, optimizer, `--dp`, `--spares` and `--from` are those of `elastic-ring
train` (see its --help). Each pattern trains for --steps in one process on one device, with --on-mesh on the rings that
`train` would have; `--cp` says for which ring bytes are counted. Dense trains under two seeds; patterns two fronts
behind the others are stopped early; neighbours on the front that are nearer than the spread of seeds get a second one.
The same command continues a killed search, each trial from its checkpoint. Writes to
`--out`: front.md (the table, whose names `--pattern` takes), front.png, front.json; prints what to run next.
`--space` names a TOML file with axes: pattern, family, density, block, layers (docs/patterns.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic_ring.cli import refused
from elastic_ring.cli.settings import PRESETS, TrainSettings, has_flag, parse
from elastic_ring.config import RunConfig
from elastic_ring.errors import ElasticRingError
from elastic_ring.train.guard_table import TUNER, reason

LEFT_OUT = {
    "checkpoint_config": "trials take checkpoints of their own; give it to train, with the pattern that is found",
    "faults": "a search has no planned faults; leave them out",
    "stop_early": "a search stops patterns that are behind two fronts; leave it out",
    "keep_best": "a search keeps no best checkpoint; give it to train, with the pattern that is found",
    "search": "a search compares itself with none; give it to train, with the pattern that is found",
    "plan": "a search is not planned; ask elastic-ring train --plan",
    "extend": "a search has no finished run to go on with; the same command continues a search",
}
"""Settings of `train` that a search has not, and what to do."""


def parse_search(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str], TrainSettings]:
    """The search's own flags, those of `train`, and what they ask for. Raises ValueError."""
    parser = argparse.ArgumentParser(
        prog="elastic-ring tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the search; the same one goes on")
    parser.add_argument("--space", type=Path, help="a TOML file of axes in place of the default ones")
    parser.add_argument("--trials", type=int, default=24, help="patterns to train, beside dense (24)")
    parser.add_argument(
        "--concurrent", type=int, default=1, help="trials at a time; times are true for one a device (1)"
    )
    parser.add_argument("--cpus-per-trial", type=float, default=1.0, help="(1)")
    parser.add_argument(
        "--on-mesh", action="store_true", help="each trial is a run on --dp x --cp, in place of one process"
    )
    parser.add_argument("--address", default="", help="of Ray, in place of RAY_ADDRESS; local starts one")
    options, rest = parser.parse_known_args(arguments)
    settings = parse(rest)
    _refuse_left_out(settings, rest)
    if settings.pattern is not None:
        raise ValueError(f"pattern={settings.pattern!r}: a search tries patterns; give them by --space")
    options.out = options.out.absolute()  # trials run in their own folders
    return options, rest, settings


def _refuse_left_out(settings: TrainSettings, arguments: Sequence[str]) -> None:
    """Raises ValueError for settings of `train` that a search would leave out without a word."""
    step = PRESETS[settings.preset]()["step"]
    sections: tuple[tuple[str, Any, Any], ...]
    sections = (("run", settings.run, RunConfig(settings.run.name)), ("step", settings.step, step))
    for section, config, usual in sections:
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            if value == getattr(usual, field.name):
                continue
            if why := reason(TUNER, field.name):
                flag = f"--{section}.{field.name.replace('_', '-')}"
                raise ValueError(f"{flag}={value}: a search has no such guard: {why}")
            if field.name in LEFT_OUT:
                raise ValueError(f"{section}.{field.name}={value}: {LEFT_OUT[field.name]}")
    for name in ("stop_early", "keep_best", "search", "plan"):
        if value := getattr(settings, name):
            raise ValueError(f"{name}={value!r}: {LEFT_OUT[name]}")
    if has_flag(arguments, "extend"):
        raise ValueError(f"--extend: {LEFT_OUT['extend']}")


def main(arguments: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        options, rest, settings = parse_search(sys.argv[1:] if arguments is None else arguments)
        from elastic_ring.cli.train import build
        from elastic_ring.tuning.search import run

        is_named = settings.run.name != f"train-1t-{settings.preset}"
        anew = replace(
            settings, run=replace(settings.run, resume="never")
        )  # no run's record says where a search begins
        return run(options, rest, build(anew), is_named=is_named)
    except (ValueError, ElasticRingError, KeyboardInterrupt) as error:
        return refused("elastic-ring tune", error, "stopped; the same command goes on with a search that has begun")
