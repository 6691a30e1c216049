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
from elastic_ring.monitor.json_files import parse_json
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


def warmup_of(total_steps: int) -> int:
    return math.ceil(WARMUP_SHARE * total_steps)


def least_of(peak_lr: float) -> float:
    """A tenth, as people write it."""
    return float(f"{peak_lr / 10:.9g}")


def default_rates(optim: Mapping[str, Any], free: set[str], run: RunConfig, *, lora: bool) -> DefaultRates:
    """Of the settings `free`; `optim` has the others. A run on record keeps its own: they are part of its identity.
    Raises ValueError where its storage does not answer."""
    peak_lr = optim["peak_lr"] if "peak_lr" not in free else ADAPTERS_LR if lora else FOLDER_LR
    usual = {"peak_lr": peak_lr, "min_lr": least_of(peak_lr), "warmup_steps": warmup_of(optim["total_steps"])}
    kept = _optim_on_record(run)
    if kept is not None:
        return DefaultRates({name: kept.get(name, usual[name]) for name in free}, "as on record of this run")
    source = f"the default for {'adapters' if lora else 'trained weights'}; {OTHERWISE}"
    return DefaultRates({name: usual[name] for name in free}, source, awaits_run="peak_lr" in free)


def _optim_on_record(run: RunConfig) -> Mapping[str, Any] | None:
    """Of the run itself or, before it has a record, of the run whose checkpoint it begins at."""
    places = [run.storage_uri]
    if run.resume not in ("auto", "never") and not run.resume.isdigit():
        places.append(run.resume.rpartition(f"/{FOLDER}/")[0] or run.resume)
    for place in places:
        storage = open_or_refuse(place, write=False, timeout_s=run.timeouts.storage_s)
        if isinstance(optim := _record(storage, CONFIG_NAME).get("optim"), dict):
            return optim
    return None


def _record(storage: Storage, name: str) -> dict[str, Any]:
    """Empty where there is none, and where it is damaged: then the trainer says so, and compares the checkpoints."""
    if not storage.exists(name):
        return {}
    try:
        return parse_json(storage.read_record(name), storage.at(name))
    except RecordDamaged:
        return {}


def at_rate_of(asked: TrainSettings, weights: RunWeights) -> TrainSettings:
    """With the rate that the run of `--from` has at the step of its weights, where nothing else gives one. Raises
    ValueError for a record that cannot be read."""
    rates = asked.rates
    if rates is None or not rates.awaits_run:
        return asked
    peak_lr, step = _rate_at_end(weights)
    if not peak_lr:
        source = f"the default, as {shown_url(weights.uri)} names no rate to go on with; {OTHERWISE}"
        return replace(asked, rates=replace(rates, source=source))
    values = {**rates.values, "peak_lr": peak_lr, **({"min_lr": least_of(peak_lr)} if "min_lr" in rates.values else {})}
    source = f"the rate of step {step} of {shown_url(weights.uri)}; {OTHERWISE}"
    return replace(asked, optim=replace(asked.optim, **values), rates=DefaultRates(values, source))


def _rate_at_end(weights: RunWeights) -> tuple[float, int]:
    """(rate, step) where the weights' run goes on; a rate of 0 without a record, and where a function gave it."""
    from elastic_ring.state.checkpoints.manifest import age_key
    from elastic_ring.train.optim import learning_rate

    storage = Storage(weights.uri)
    config = _record(storage, CONFIG_NAME)
    step = age_key(weights.folder)[1] if weights.folder else _record(storage, SUMMARY_NAME).get("steps")
    try:
        if type(step) is not int or "optim" not in config or "lr_schedule" in config.get("code", {}):
            return 0.0, 0
        return learning_rate(step, from_plain(OptimConfig, config["optim"], "optim.")), step
    except (ValueError, TypeError) as error:
        told = f"from={shown_url(weights.uri)!r}: its {CONFIG_NAME} has no rate that can be read ({error})"
        raise ValueError(f"{told}: give --optim.peak-lr") from error


def rate_line(optim: OptimConfig, rates: DefaultRates) -> str:
    values = ", ".join(f"{name}={getattr(optim, name):g}" for name in RATES)
    return f"learning rate: {values} ({rates.source})"
