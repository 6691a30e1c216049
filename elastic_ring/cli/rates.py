"""The learning rate of a run on trained weights, where its settings give none. torch is imported where it is there
already; the rates of presets do not belong here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from elastic_ring.config import OptimConfig, RunConfig
from elastic_ring.errors import RecordDamaged
from elastic_ring.files import shown_url
from elastic_ring.monitor.json_files import as_written, parse_json
from elastic_ring.monitor.metrics import CONFIG_NAME, SUMMARY_NAME
from elastic_ring.state.checkpoints import FOLDER
from elastic_ring.state.storage.folder import Storage, open_or_refuse
from elastic_ring.validation import from_plain

if TYPE_CHECKING:
    from elastic_ring.cli.settings import TrainSettings
    from elastic_ring.state.checkpoints.stored_weights import RunWeights

RATES = ("peak_lr", "min_lr", "warmup_steps")
FOLDER_LR, ADAPTERS_LR = 2e-5, 1e-4
WARMUP_SHARE = 0.03
OTHERWISE = "--optim.peak-lr sets another"


@dataclass(frozen=True)
class DefaultRates:
    """`values` of the settings in `RATES` that nobody gave, and their `source`, in words. `awaits_run`: the run of
    `--from` decides them, once its weights are open."""

    values: Mapping[str, Any]
    source: str
    awaits_run: bool = False


def usual_rates(peak_lr: float, total_steps: int) -> dict[str, Any]:
    least = float(f"{peak_lr / 10:.9g}")  # as people write it
    return {"peak_lr": peak_lr, "min_lr": least, "warmup_steps": math.ceil(WARMUP_SHARE * total_steps)}


def default_rates(optim: Mapping[str, Any], free: set[str], run: RunConfig, *, lora: bool) -> DefaultRates:
    """Of the settings `free`; `optim` has the others. A run on record keeps its own: they are part of its identity.
    Raises ValueError where its storage does not answer."""
    peak_lr = optim["peak_lr"] if "peak_lr" not in free else ADAPTERS_LR if lora else FOLDER_LR
    usual, kept = usual_rates(peak_lr, optim["total_steps"]), _optim_on_record(run)
    if kept is not None:
        return DefaultRates({name: kept.get(name, usual[name]) for name in free}, "as on record of this run")
    source = f"the default for {'adapters' if lora else 'trained weights'}; {OTHERWISE}"
    return DefaultRates({name: usual[name] for name in free}, source, awaits_run="peak_lr" in free)


def _optim_on_record(run: RunConfig) -> Mapping[str, Any] | None:
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


def at_rate_of(asked: TrainSettings, weights: RunWeights) -> TrainSettings:
    """With the rate that the run of `--from` has at the step of its weights, where nothing else gives one. Raises
    RecordDamaged."""
    rates = asked.rates
    if rates is None or not rates.awaits_run or not (end := _rate_at_end(weights))[0]:
        return asked
    peak_lr, step = end
    usual = usual_rates(peak_lr, asked.optim.total_steps)
    values = {name: usual[name] for name in rates.values}
    rates = DefaultRates(values, f"the rate of step {step} of {shown_url(weights.uri)}; {OTHERWISE}")
    return replace(asked, optim=replace(asked.optim, **values), rates=rates)


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


def rate_line(optim: OptimConfig, rates: DefaultRates) -> str:
    values = ", ".join(f"{name}={getattr(optim, name):g}" for name in RATES)
    return f"learning rate: {values} ({rates.source})"
