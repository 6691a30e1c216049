"""What a search has found: means and spread over seeds, the front as a table, a picture and JSON, what to run next."""

from __future__ import annotations

import json
import logging
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from elastic_ring.attention.patterns.layers import LayerPatterns
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.config import StepConfig
from elastic_ring.files import plain_json, read_small
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.identity import told_apart
from elastic_ring.tuning.pareto import front
from elastic_ring.tuning.space import DENSE

log = logging.getLogger(__name__)

Trial = Mapping[str, Any]
MODEL = ("model", "slices of the model", "step.linears", "step.kv_wire", "step.param_dtype")
OF_LOSS = ("data", "validation", "initial", "loss", "optimizer", "lr_schedule")
"""Entries of what a run is measured on: those that its step depends on, too, and those of its loss beside `optim`."""


@dataclass(frozen=True)
class Found:
    """A pattern over its seeds. `gap`: to dense under the same seeds, on average; `loss`: dense's mean and that gap."""

    pattern: str
    loss: float
    gap: float
    step_s: float
    bytes: int
    density: float
    num_seeds: int


def whole(trials: Iterable[Trial]) -> list[Trial]:
    """Those that trained to the end, as results with `losses` of as many reports as any."""
    every = [trial for trial in trials if trial.get("losses") and not trial.get("rejected")]
    most = max((len(trial["losses"]) for trial in every), default=0)
    return [trial for trial in every if len(trial["losses"]) == most]


def found(trials: Iterable[Trial]) -> list[Found]:
    """By pattern. Raises ValueError where dense itself is not among the trials."""
    by_pattern = _by_pattern(trials)
    dense = by_pattern.get(DENSE)
    if not dense:
        raise ValueError("dense itself was not trained to the end, so no gap to it can be told: its trials say why")
    base = statistics.fmean(trial["loss"] for trial in dense.values())
    made = []
    for pattern, seeds in by_pattern.items():
        gaps = [trial["loss"] - dense[seed]["loss"] for seed, trial in seeds.items() if seed in dense]
        if gaps:
            gap, one = statistics.fmean(gaps), next(iter(seeds.values()))
            step_s = statistics.median(trial["step_s"] for trial in seeds.values())
            made.append(Found(pattern, base + gap, gap, step_s, one["bytes"], one["density"], len(gaps)))
    return made


def _by_pattern(trials: Iterable[Trial]) -> dict[str, dict[int, Trial]]:
    by_pattern = defaultdict[str, dict[int, Trial]](dict)
    for trial in whole(trials):
        by_pattern[trial["pattern"]][trial["seed"]] = trial
    return by_pattern


def spread(trials: Iterable[Trial]) -> tuple[float, int]:
    """(largest distance between the losses of two seeds of one pattern, number of patterns with two)."""
    losses = [[trial["loss"] for trial in seeds.values()] for seeds in _by_pattern(trials).values() if len(seeds) > 1]
    return max((max(each) - min(each) for each in losses), default=0.0), len(losses)


def on_front(every: Sequence[Found]) -> list[Found]:
    """Those that none beats in loss, time and bytes, the slowest first."""
    best = front([(one.gap, one.step_s, one.bytes) for one in every])
    return sorted((every[i] for i in best), key=lambda one: (-one.step_s, one.loss))


def in_doubt(every: Sequence[Found], spread_nats: float) -> list[str]:
    """The patterns on the front with one seed whose neighbour's loss is within the spread."""
    close = [pair for pair in pairwise(on_front(every)) if abs(pair[0].loss - pair[1].loss) <= spread_nats]
    return list(dict.fromkeys(one.pattern for pair in close for one in pair if one.num_seeds < 2))


def advised(every: Sequence[Found], spread_nats: float) -> Found:
    """The fastest of the front whose loss is within the spread of the least one's; where that is dense, the one with
    the least loss after it, if there is any."""
    best = on_front(every)
    close = [one for one in best if one.loss <= min(each.loss for each in best) + spread_nats]
    sparse = [one for one in close if one.pattern != DENSE] or sorted(
        (one for one in best if one.pattern != DENSE), key=lambda one: one.loss
    )[:1]
    return min(sparse or best, key=lambda one: one.step_s)


def report(trials: Sequence[Trial], out: Path, title: str, trained: Mapping[str, Any] | None = None) -> str:
    """Write front.md, front.json and front.png into `out`; returns the table. `trials`: what trials reported last, as
    `[result.metrics for result in results]` of a `ResultGrid`; `trained`: on what they ran, as `as_trained` has it."""
    every, (nats, num) = found(trials), spread(trials)
    best, dense = on_front(every), next(one for one in every if one.pattern == DENSE)
    lines = [
        title,
        f"{len(every)} of {len({trial.get('pattern') for trial in trials})} patterns trained to the end, {len(best)} on"
        f" the front. Spread of seeds {nats:.4f} nats (the largest, over {num} pattern(s) with two).",
        "",
        "| `--pattern` | loss | gap to dense | seeds | step, s | of dense | bytes | density |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| `{one.pattern}` | {one.loss:.4f} | {one.gap:+.4f} | {one.num_seeds} | {one.step_s:.4f} |"
            f" {one.step_s / dense.step_s:.2f} | {one.bytes:,} | {one.density:.3f} |"
            for one in best
        ),
    ]
    text = "\n".join(lines) + "\n"
    (out / "front.md").write_text(text, encoding="utf-8")
    plain = {
        "trained": trained,
        "spread": nats,
        "front": [asdict(one) for one in best],
        "all": [asdict(one) for one in every],
    }
    (out / "front.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    try:
        draw(every, best, nats, out / "front.png")
    except ModuleNotFoundError as error:
        log.warning("no front.png: %s is not installed; pip install 'elastic-ring[tune]'", error.name)
    return text


def as_trained(step: StepConfig, mesh: Mesh, device: str, contents: Mapping[str, str]) -> dict[str, Any]:
    """What a time and a loss hold for. `contents`: as `ElasticRingTrainer.measured_on`."""
    same = {name: getattr(step, name) for name in ("steps", "global_batch", "context_tokens")}
    rates = {name for name in contents if name.startswith("optim.")} - {"optim.total_steps"}  # it goes with the steps
    own = {name: contents[name] for name in sorted({*MODEL, *OF_LOSS, *rates} & {*contents})}
    return {**same, "mesh": str(mesh), "device": device, **own}


@dataclass(frozen=True)
class Predicted:
    """What a search has found of one pattern. `trained`: as `as_trained`; `spread`: of seeds, in nats."""

    loss: float
    step_s: float
    spread: float
    trained: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path, pattern: LayerPatterns | None) -> Predicted:
        """Of `pattern` (None: dense) as the search of `folder` has it. Raises ValueError where it has not."""
        path = folder / "front.json"
        try:
            told = plain_json(read_small(path))
            spread_nats, trained, every = float(told["spread"]), dict(told["trained"]), told["all"]
            known = {str(one["pattern"]): (float(one["loss"]), float(one["step_s"])) for one in every}
            same = [found for text, found in known.items() if parse_pattern(text) == (pattern or parse_pattern(DENSE))]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"search={str(folder)!r}: {path} cannot be read ({error}): name the --out of a search"
            ) from error
        if not same:
            raise ValueError(
                f"search={str(folder)!r}: has not trained this pattern to the end, but {', '.join(known)}: give one of "
                "these as --pattern, or leave --search out"
            )
        return cls(*same[0], spread_nats, trained)

    def beside(self, now: Mapping[str, Any], step_s: float, loss: float | None) -> str:
        """A line of what was predicted and what a run has seen, `now` as `as_trained`: its step where mesh and device
        are the search's, its loss after the same tokens; else with the difference."""
        other = {name for name in now if now[name] != self.trained.get(name)}
        of_step = other & {"global_batch", "context_tokens", "mesh", "device", *MODEL}
        told = f"search: step predicted {self.step_s:.4g} s, seen {step_s:.4g} s"
        told += "" if of_step else f" ({100 * (self.step_s / step_s - 1):+.1f} %)"
        if loss is not None:
            told += f"; loss predicted {self.loss:.4f}, seen {loss:.4f}"
            within = "within" if abs(loss - self.loss) <= self.spread else "outside"
            if other <= {"mesh", "device"}:
                told += f" ({loss - self.loss:+.4f}, {within} the spread of seeds, {self.spread:.4f})"
        before = {name: str(self.trained.get(name, "not on record")) for name in other}
        apart = {name: told_apart(before[name], str(now[name])) for name in sorted(other)}
        where = ", ".join(f"{name} {there}, not {here}" for name, (there, here) in apart.items())
        return told + (f"; the search had {where}" if where else "")


def draw(every: Sequence[Found], best: Sequence[Found], spread_nats: float, path: Path) -> Any:
    """Loss over the time of a step. The names of the front stand beside the plot, one below another in the order of
    their losses, so that none covers another. Returns the figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, max(4.5, 0.3 * len(best) + 1.5)))
    axes = figure.add_axes((0.09, 0.12, 0.45, 0.8))
    axes.scatter([one.step_s for one in every], [one.loss for one in every], s=16, color="#9aa5b1")
    axes.errorbar(
        [one.step_s for one in best],
        [one.loss for one in best],
        yerr=spread_nats / 2,
        fmt="o",
        capsize=3,
        color="#1f4e79",
    )
    ordered = sorted(best, key=lambda one: -one.loss)
    for number, one in enumerate(ordered):
        axes.annotate(
            one.pattern,
            (one.step_s, one.loss),
            xytext=(1.08, 1 - (number + 0.5) / len(ordered)),
            textcoords="axes fraction",
            fontsize=8,
            va="center",
            arrowprops={"arrowstyle": "-", "color": "#c3cad2", "linewidth": 0.7},
        )
    axes.set_xlabel("time of a step, s")
    axes.set_ylabel("loss on held-out sequences, nats (bars: spread of seeds)")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    return figure
