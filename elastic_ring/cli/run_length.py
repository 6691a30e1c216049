"""How long a run is: by epochs of its data, or longer than it was. torch and Ray are not imported."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from elastic_ring.cli.data_settings import validation_sets
from elastic_ring.config import RunConfig
from elastic_ring.files import plain_json

log = logging.getLogger(__name__)


def steps_of(flags: Any, made: Mapping[str, Any], sets: str | None, *, has_steps: bool) -> int:
    """The steps in which each sequence is used so often; `sets` as `--validate` has them. Raises ValueError for
    `--steps` beside it."""
    from elastic_ring.cli.data_settings import data_source
    from elastic_ring.data.source import hold_out, open_source

    if has_steps:
        raise ValueError(f"epochs={flags.epochs:g} beside steps: give one of them")
    if not 0 < flags.epochs < math.inf:
        raise ValueError(f"epochs={flags.epochs:g}: give a number above 0")
    step = made["step"]
    own = [one.data for one in validation_sets(sets)] if sets else [""]
    held = step.num_val_sequences if step.validates and "" in own else 0
    source = open_source(data_source(made["data"], made["model"], step.context_tokens))
    training, _ = hold_out(source, num_sequences=held)
    return math.ceil(flags.epochs * training.num_sequences / step.global_batch)


def schedule_before(run: RunConfig, steps: int, *, replans: bool) -> dict[str, Any]:
    """The settings of the schedule of a longer run: those with which it has begun or, if it `replans`, with a warm-up
    and a decay of the further steps after them. Raises ValueError where there is none to extend."""
    from elastic_ring.monitor.metrics import CONFIG_NAME
    from elastic_ring.state.storage.folder import open_or_refuse

    storage = open_or_refuse(run.storage_uri, write=False, timeout_s=run.timeouts.storage_s)
    if not storage.exists(CONFIG_NAME):
        raise ValueError(f"extend=True: {run.storage_uri} has no run {run.name!r}; leave it out for a new one")
    try:
        found = plain_json(storage.read_record(CONFIG_NAME))
        before, optim = int(found["step"]["steps"]), found["optim"]
        made = {name: int(optim[name]) for name in ("total_steps", "warmup_steps")}
        replanned = [int(step) for step in optim.get("replanned", [])]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"extend=True: {CONFIG_NAME} in {run.storage_uri} cannot be read: {error}") from error
    if steps < before:
        raise ValueError(f"steps={steps}: run {run.name!r} has {before} already; give more, or leave extend out")
    told = f"run {run.name} goes on from {before} to {steps} steps; its schedule ends after {made['total_steps']}, and"
    if steps == before:  # the same command, given again
        if replans and not replanned:
            raise ValueError(f"replan=True: run {run.name!r} has {before} steps already; give more")
    elif replans:
        replanned += [made["total_steps"], before]
        made["total_steps"] = steps
        log.info("%s further steps warm up and decay anew", told)
    else:
        log.info("%s later steps keep the last rate", told)
    return {**made, "replanned": replanned}
