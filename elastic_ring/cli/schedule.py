"""The length of a run, by epochs of its data or further than it went, and the default learning rate of trained weights.

torch is imported only to compute another run's rate, Ray is not.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict, cast

from elastic_ring.cli.data_settings import DataConfig, data_source, validation_sets
from elastic_ring.config import OptimConfig, RunConfig, StepConfig
from elastic_ring.errors import RecordDamaged
from elastic_ring.files import plain_json, shown_url
from elastic_ring.model.config import ModelConfig
from elastic_ring.monitor.json_files import as_written, parse_json
from elastic_ring.monitor.metrics import CONFIG_NAME, SUMMARY_NAME
from elastic_ring.state.checkpoints import FOLDER
from elastic_ring.state.storage.folder import Storage, open_or_refuse
from elastic_ring.validation import from_plain

if TYPE_CHECKING:
    from elastic_ring.cli.settings import TrainSettings
    from elastic_ring.state.checkpoints.stored_weights import RunWeights

log = logging.getLogger(__name__)

RATES = ("peak_lr", "min_lr", "warmup_steps")
FOLDER_LR, ADAPTERS_LR = 2e-5, 1e-4
WARMUP_SHARE = 0.03
OTHERWISE = "--optim.peak-lr sets another"


class Rates(TypedDict, total=False):
    peak_lr: float
    min_lr: float
    warmup_steps: int


def steps_of(epochs: float, data: DataConfig, model: ModelConfig, step: StepConfig, sets: str | None) -> int:
    """The steps in which each sequence is used `epochs` times; `sets` as `--validate` has them."""
    from elastic_ring.data.source import hold_out, open_source

    if not 0 < epochs < math.inf:
        raise ValueError(f"epochs={epochs:g}: give a number above 0")
    own = [entry.data for entry in validation_sets(sets)] if sets else [""]
    held = step.num_val_sequences if step.validates and "" in own else 0
    source = open_source(data_source(data, model, step))
    training, _ = hold_out(source, num_sequences=held)
    return math.ceil(epochs * training.num_sequences / step.global_batch)


def schedule_before(run: RunConfig, steps: int, *, replans: bool) -> dict[str, int | list[int]]:
    """The settings of the schedule of a longer run: those with which it has begun or, if it `replans`, with a warm-up
    and a decay of the further steps after them. Raises ValueError where there is none to extend."""
    storage = open_or_refuse(run.storage_uri, write=False, timeout_s=run.timeouts.storage_s)
    if not storage.exists(CONFIG_NAME):
        raise ValueError(f"extend=True: {run.storage_uri} has no run {run.name!r}; leave it out for a new one")
    try:
        config = plain_json(storage.read_record(CONFIG_NAME))
        before, optim = int(config["step"]["steps"]), config["optim"]
        lengths = {name: int(optim[name]) for name in ("total_steps", "warmup_steps")}
        replanned = [int(step) for step in optim.get("replanned", [])]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"extend=True: {CONFIG_NAME} in {run.storage_uri} cannot be read: {error}") from error
    if steps < before:
        raise ValueError(f"steps={steps}: run {run.name!r} has {before} already; give more, or leave extend out")
    message = (
        f"run {run.name} goes on from {before} to {steps} steps; its schedule ends after {lengths['total_steps']}, and"
    )
    if steps == before:  # the same command, given again
        if replans and not replanned:
            raise ValueError(f"replan=True: run {run.name!r} has {before} steps already; give more")
    elif replans:
        replanned += [lengths["total_steps"], before]
        lengths["total_steps"] = steps
        log.info("%s further steps warm up and decay anew", message)
    else:
        log.info("%s later steps keep the last rate", message)
    return {**lengths, "replanned": replanned}


@dataclass(frozen=True)
class DefaultRates:
    """`values` of the settings in `RATES` that were not set, and their `source`, in words."""

    values: Rates
    source: str


def usual_rates(peak_lr: float, total_steps: int) -> Rates:
    least = float(f"{peak_lr / 10:.9g}")  # as people write it
    return {"peak_lr": peak_lr, "min_lr": least, "warmup_steps": math.ceil(WARMUP_SHARE * total_steps)}


def default_rates(optim: Mapping[str, float], unset: set[str], *, lora: bool, has_run: bool) -> DefaultRates:
    """Of the settings `unset`; `optim` has the others. `has_run`: the rate of a run may replace them, so a `min_lr`
    above them is no mistake yet."""
    peak_lr, source = ADAPTERS_LR if lora else FOLDER_LR, f"the default for {'adapters' if lora else 'trained weights'}"
    if "peak_lr" not in unset:
        peak_lr, source = optim["peak_lr"], "peak_lr as set"
    values = _only(usual_rates(peak_lr, int(optim["total_steps"])), unset)
    if has_run and "peak_lr" in unset and "min_lr" not in unset:
        values["peak_lr"] = max(peak_lr, optim["min_lr"])
    return DefaultRates(values, source if "peak_lr" not in unset else f"{source}; {OTHERWISE}")


def _only(rates: Rates, names: Collection[str]) -> Rates:
    return cast("Rates", {name: value for name, value in rates.items() if name in names})


def with_rates(settings: TrainSettings, weights: RunWeights | None) -> TrainSettings:
    """With the rates on record of the run, which are part of its identity; else with the rate that the run of `--from`
    has at the step of its `weights`. Raises ValueError where a storage does not answer, RecordDamaged."""
    rates, optim = settings.rates, settings.optim
    if rates is None:
        return settings
    recorded_optim = None if settings.run.resume == "never" else _optim_on_record(settings.run)
    if recorded_optim is not None:
        values = {**rates.values, **{name: recorded_optim[name] for name in rates.values if name in recorded_optim}}
        rates = DefaultRates(cast("Rates", values), "as on record of this run")
    elif weights is not None and "peak_lr" in rates.values:
        peak_lr, step = _rate_at_end(weights)
        source = f"the rate of step {step} of {shown_url(weights.uri)}; {OTHERWISE}" if peak_lr else rates.source
        rates = DefaultRates(_only(usual_rates(peak_lr or FOLDER_LR, optim.total_steps), rates.values), source)
    optim = replace(optim, **rates.values)
    log.info("learning rate: %s (%s)", ", ".join(f"{name}={getattr(optim, name):g}" for name in RATES), rates.source)
    return replace(settings, optim=optim, rates=rates)


def _optim_on_record(run: RunConfig) -> Mapping[str, object] | None:
    """Of the run itself or, before it has a record, of the run whose checkpoint it begins at."""
    places = [run.storage_uri]
    if run.resume not in ("auto", "never") and not run.resume.isdigit():
        places.append(run.resume.rpartition(f"/{FOLDER}/")[0] or run.resume)
    storages = (open_or_refuse(place, write=False, timeout_s=run.timeouts.storage_s) for place in places)
    records = (_record(storage, CONFIG_NAME).get("optim") for storage in storages)
    return next((optim for optim in records if isinstance(optim, dict)), None)


def _record(storage: Storage, name: str) -> dict[str, Any]:
    """Empty where there is none, and where it is damaged: then the trainer says so, and compares the checkpoints."""
    try:
        return parse_json(storage.read_record(name), storage.at(name)) if storage.exists(name) else {}
    except RecordDamaged:
        return {}


def _rate_at_end(weights: RunWeights) -> tuple[float, int]:
    """(rate, step) where the weights' run goes on; a rate of 0 without a record, and where a function gave it."""
    from elastic_ring.state.checkpoints.manifest import age_key
    from elastic_ring.train.optim import learning_rate

    storage = Storage(weights.uri)
    config = _record(storage, CONFIG_NAME)
    step = age_key(weights.folder)[1] if weights.folder else _record(storage, SUMMARY_NAME).get("steps")
    with as_written(storage.at(CONFIG_NAME)):
        if type(step) is not int or "optim" not in config or "lr_schedule" in config.get("code", {}):
            return 0.0, 0
        return learning_rate(step, from_plain(OptimConfig, config["optim"], "optim.")), step
