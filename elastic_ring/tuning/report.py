"""The results of a search: means and spread over seeds, the front as a table, a plot and JSON, the next run.

All objectives are minimised. Nothing is trained and no trial is chosen in here.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from elastic_ring.attention.patterns.layers import LayerPatterns
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.config import StepConfig
from elastic_ring.files import plain_json, read_small
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.identity import contrast
from elastic_ring.tuning.space import DENSE, PatternCost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from elastic_ring.train.task import TrainingTask

log = logging.getLogger(__name__)

NUM_REPORTS = 4
REJECTED_LOSS = 1e9
"""Stands for a missing loss or time: Optuna refuses infinite values."""
MODEL = ("model", "slices of the model", "step.linears", "step.kv_wire", "step.param_dtype")
OF_LOSS = ("data", "validation", "initial", "loss", "optimizer", "lr_schedule")
"""What a run's loss depends on beside `optim`; its step depends on MODEL, too."""

Point = Sequence[float]


class TrialResult(TypedDict, total=False):
    """A trial's report. `losses`: at each report so far; `rejected`: why a pattern cannot be trained."""

    pattern: str
    seed: int
    loss: float
    losses: list[float]
    step_s: float
    density: float
    bytes: int
    tokens: int
    rejected: str
    done: bool
    should_checkpoint: bool
    trial_id: str


def trial_result(
    pattern: str,
    task: TrainingTask,
    cost: PatternCost,
    losses: list[float],
    step_s: float | None,
    steps: int,
    rejected: str,
) -> TrialResult:
    """A trial's report; without losses, or without a time, a value that loses stands for it."""
    return {
        "pattern": pattern,
        "seed": task.step.seed,
        "loss": losses[-1] if losses else REJECTED_LOSS,
        "losses": losses,
        "step_s": REJECTED_LOSS if step_s is None else step_s,
        "density": cost.density,
        "bytes": cost.bytes,
        "tokens": task.step.tokens_per_step * steps,
        "rejected": rejected,
    }


# ------------------------------------------------------------ fronts


def dominates(a: Point, b: Point) -> bool:
    """Whether `a` is at least as good as `b` in every objective and better in one."""
    return all(x <= y for x, y in zip(a, b, strict=True)) and any(x < y for x, y in zip(a, b, strict=True))


def ranks(points: Sequence[Point]) -> list[int]:
    """For each point the index of its front: 0 is dominated by none, 1 only by front 0, and so on.

    Raises: ValueError for a value that is not finite.
    """
    if not all(math.isfinite(value) for point in points for value in point):
        raise ValueError("a point has an objective that is not finite: leave such points out, as diverged")
    ranked, rank = [-1] * len(points), 0
    while -1 in ranked:
        remaining = [i for i, own in enumerate(ranked) if own == -1]
        for i in [i for i in remaining if not any(dominates(points[j], points[i]) for j in remaining)]:
            ranked[i] = rank
        rank += 1
    return ranked


def front(points: Sequence[Point]) -> list[int]:
    """The indices of the non-dominated points."""
    return [i for i, rank in enumerate(ranks(points)) if rank == 0]


def hypervolume(points: Sequence[Point], reference: Point) -> float:
    """The volume that `points` dominate up to `reference`; exact, by slices along the last objective."""
    inside = [tuple(p) for p in points if all(x < r for x, r in zip(p, reference, strict=True))]
    if not inside:
        return 0.0
    if len(reference) == 1:
        return float(reference[0]) - min(p[0] for p in inside)
    levels = sorted({p[-1] for p in inside})
    volume = 0.0
    for level, above in zip(levels, [*levels[1:], reference[-1]], strict=True):
        slice_ = [p[:-1] for p in inside if p[-1] <= level]
        volume += (above - level) * hypervolume(slice_, reference[:-1])
    return volume


# ------------------------------------------------------------ results


@dataclass(frozen=True)
class PatternResult:
    """A pattern over its seeds. `gap`: to dense under the same seeds, on average; `loss`: dense's mean and that gap."""

    pattern: str
    loss: float
    gap: float
    step_s: float
    bytes: int
    density: float
    num_seeds: int


def pattern_results(trials: Iterable[TrialResult]) -> list[PatternResult]:
    """One result per pattern. Raises ValueError where dense itself is not among the trials."""
    by_pattern = _by_pattern(trials)
    dense = by_pattern.get(DENSE)
    if not dense:
        raise ValueError("dense itself was not trained to the end, so the gap to it is unknown: its trials say why")
    base = statistics.fmean(trial["loss"] for trial in dense.values())
    results = []
    for pattern, seeds in by_pattern.items():
        gaps = [trial["loss"] - dense[seed]["loss"] for seed, trial in seeds.items() if seed in dense]
        if gaps:
            gap, first = statistics.fmean(gaps), next(iter(seeds.values()))
            step_s = statistics.median(trial["step_s"] for trial in seeds.values())
            results.append(PatternResult(pattern, base + gap, gap, step_s, first["bytes"], first["density"], len(gaps)))
    return results


def _by_pattern(trials: Iterable[TrialResult]) -> dict[str, dict[int, TrialResult]]:
    """Pattern and seed of all trials with as many losses as any: they trained to the end."""
    trained = [trial for trial in trials if trial.get("losses") and not trial.get("rejected")]
    most = max((len(trial["losses"]) for trial in trained), default=0)
    by_pattern = defaultdict[str, dict[int, TrialResult]](dict)
    for trial in trained:
        if len(trial["losses"]) == most:
            by_pattern[trial["pattern"]][trial["seed"]] = trial
    return by_pattern


def spread(trials: Iterable[TrialResult]) -> tuple[float, int]:
    """(largest distance between the losses of two seeds of one pattern, number of patterns with two)."""
    losses = [[trial["loss"] for trial in seeds.values()] for seeds in _by_pattern(trials).values() if len(seeds) > 1]
    return max((max(each) - min(each) for each in losses), default=0.0), len(losses)


def front_results(results: Sequence[PatternResult]) -> list[PatternResult]:
    """The results that none beats in loss, time and bytes, the slowest first."""
    best = front([(result.gap, result.step_s, result.bytes) for result in results])
    return sorted((results[i] for i in best), key=lambda result: (-result.step_s, result.loss))


def patterns_in_doubt(results: Sequence[PatternResult], spread_nats: float) -> list[str]:
    """The patterns on the front with one seed whose neighbour's loss is within the spread."""
    close = [pair for pair in pairwise(front_results(results)) if abs(pair[0].loss - pair[1].loss) <= spread_nats]
    return list(dict.fromkeys(result.pattern for pair in close for result in pair if result.num_seeds < 2))


def recommend(results: Sequence[PatternResult], spread_nats: float) -> tuple[PatternResult, str]:
    """(result, what it costs beside dense): the fastest of the front whose loss is within the spread of the least loss;
    where only dense is, the sparse pattern of least loss. Dense where all others are slower, or as fast, without a
    loss that is lower by more than the spread."""
    best, dense = front_results(results), next(result for result in results if result.pattern == DENSE)
    sparse = [
        result
        for result in best
        if result.pattern != DENSE and (result.step_s < dense.step_s or result.gap < -spread_nats)
    ]
    if not sparse:
        return dense, "no pattern is faster than dense, or better by more than the spread of seeds: train dense"
    least = min(result.loss for result in best)
    close = [result for result in sparse if result.loss <= least + spread_nats]
    result = min(close or sorted(sparse, key=lambda each: each.loss)[:1], key=lambda each: each.step_s)
    share = result.step_s / dense.step_s
    return result, f"{result.pattern} beside dense: {share:.2f} times its step, {result.gap:+.4f} in loss"


def title_of(step: StepConfig, cp: int) -> str:
    sizes = f"{step.steps} steps of {step.global_batch} x {step.context_tokens} tokens"
    return f"{sizes}; bytes: K and V that a ring of {cp} receives in a forward pass."


def report(trials: Sequence[TrialResult], out: Path, title: str, trained: Mapping[str, str | int] | None = None) -> str:
    """Write front.md, front.json and front.png into `out`; returns the table. `trials`: the last report of each trial,
    as `[result.metrics for result in results]` of a `ResultGrid`; `trained`: `training_terms` of the trials."""
    results, (nats, num) = pattern_results(trials), spread(trials)
    best, dense = front_results(results), next(result for result in results if result.pattern == DENSE)
    lines = [
        title,
        f"{len(results)} of {len({trial.get('pattern') for trial in trials})} patterns trained to the end, {len(best)}"
        f" on the front. Spread of seeds {nats:.4f} nats (the largest, over {num} pattern(s) with two).",
        "",
        "| `--pattern` | loss | gap to dense | seeds | step, s | of dense | bytes | density |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| `{result.pattern}` | {result.loss:.4f} | {result.gap:+.4f} | {result.num_seeds} | {result.step_s:.4f} |"
            f" {result.step_s / dense.step_s:.2f} | {result.bytes:,} | {result.density:.3f} |"
            for result in best
        ),
    ]
    text = "\n".join(lines) + "\n"
    (out / "front.md").write_text(text, encoding="utf-8")
    tables = {name: [asdict(result) for result in each] for name, each in (("front", best), ("all", results))}
    plain = {"trained": trained, "spread": nats, **tables}
    (out / "front.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    try:
        draw(results, best, nats, out / "front.png")
    except ModuleNotFoundError as error:
        log.warning("no front.png: %s is not installed; pip install '.[tune]'", error.name)
    return text


def draw(results: Sequence[PatternResult], best: Sequence[PatternResult], spread_nats: float, path: Path) -> Figure:
    """Loss over the time of a step. The names of the front stand beside the plot, one below another in the order of
    their losses, so that none covers another. Returns the figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, max(4.5, 0.3 * len(best) + 1.5)))
    axes = figure.add_axes((0.09, 0.12, 0.45, 0.8))
    axes.scatter([result.step_s for result in results], [result.loss for result in results], s=16, color="#9aa5b1")
    times, losses = [result.step_s for result in best], [result.loss for result in best]
    axes.errorbar(times, losses, yerr=spread_nats / 2, fmt="o", capsize=3, color="#1f4e79")
    for number, result in enumerate(sorted(best, key=lambda result: -result.loss)):
        axes.annotate(
            result.pattern,
            (result.step_s, result.loss),
            xytext=(1.08, 1 - (number + 0.5) / len(best)),
            textcoords="axes fraction",
            fontsize=8,
            va="center",
            arrowprops={"arrowstyle": "-", "color": "#c3cad2", "linewidth": 0.7},
        )
    axes.set_xlabel("time of a step, s")
    axes.set_ylabel("loss on held-out sequences, nats (bars: spread of seeds)")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    return figure


# ------------------------------------------------------------ a run beside its search


def training_terms(step: StepConfig, mesh: Mesh, device: str, contents: Mapping[str, str]) -> dict[str, str | int]:
    """The settings for which a time and a loss hold. `contents`: as `ElasticRingTrainer.measured_on`."""
    sizes = {"steps": step.steps, "global_batch": step.global_batch, "context_tokens": step.context_tokens}
    rates = {name for name in contents if name.startswith("optim.")} - {"optim.total_steps"}  # follows from the steps
    own = {name: contents[name] for name in sorted({*MODEL, *OF_LOSS, *rates} & {*contents})}
    return {**sizes, "mesh": str(mesh), "device": device, **own}


@dataclass(frozen=True)
class Prediction:
    """What a search measured of one pattern. `trained`: its `training_terms`; `spread`: of seeds, in nats."""

    loss: float
    step_s: float
    spread: float
    trained: Mapping[str, str | int]

    @classmethod
    def read(cls, folder: Path, pattern: LayerPatterns | None) -> Prediction:
        """The entry of `pattern` (None: dense) in the search of `folder`. Raises ValueError where there is none."""
        path = folder / "front.json"
        try:
            record = plain_json(read_small(path))
            spread_nats, trained = float(record["spread"]), dict(record["trained"])
            rows = {str(row["pattern"]): (float(row["loss"]), float(row["step_s"])) for row in record["all"]}
            same = [row for text, row in rows.items() if parse_pattern(text) == (pattern or parse_pattern(DENSE))]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"search={str(folder)!r}: {path} cannot be read ({error}): name the --out of a search"
            ) from error
        if not same:
            raise ValueError(
                f"search={str(folder)!r}: has not trained this pattern to the end, but {', '.join(rows)}: give one of "
                "these as --pattern, or leave --search out"
            )
        return cls(*same[0], spread_nats, trained)

    def compare(self, now: Mapping[str, str | int], step_s: float, loss: float | None) -> str:
        """One line: predicted and measured step and loss of a run with the terms `now`. The step's difference is given
        where mesh and device are the search's, the loss's after the same tokens; different terms are listed."""
        other = {name for name in now if now[name] != self.trained.get(name)}
        of_step = other & {"global_batch", "context_tokens", "mesh", "device", *MODEL}
        line = f"search: step predicted {self.step_s:.4g} s, seen {step_s:.4g} s"
        line += "" if of_step else f" ({100 * (self.step_s / step_s - 1):+.1f} %)"
        if loss is not None:
            line += f"; loss predicted {self.loss:.4f}, seen {loss:.4f}"
            within = "within" if abs(loss - self.loss) <= self.spread else "outside"
            if other <= {"mesh", "device"}:
                line += f" ({loss - self.loss:+.4f}, {within} the spread of seeds, {self.spread:.4f})"
        before = {name: str(self.trained.get(name, "not on record")) for name in other}
        apart = {name: contrast(before[name], str(now[name])) for name in sorted(other)}
        where = ", ".join(f"{name} {there}, not {here}" for name, (there, here) in apart.items())
        return line + (f"; the search had {where}" if where else "")
