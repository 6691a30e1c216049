"""The output of a search: the table of its front, the plot, the patterns as files. No Ray and no training in here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_ring.tuning.fidelity import places
from elastic_ring.tuning.pareto import front, rank_correlation
from elastic_ring.tuning.space import candidates

Trial = dict[str, Any]


def placed(trials: Sequence[Trial], base: dict[str, Any]) -> list[Trial]:
    """Each trained pattern once per layout, with the objectives in that layout."""
    by_name = {candidate.name: candidate for candidate in candidates()}
    found = []
    for name, trial in {trial["name"]: trial for trial in trials}.items():
        for layout, (step, num_bytes) in places(base, by_name[name]).items():
            found.append({**trial, "layout": layout, "step_s": step, "bytes": num_bytes})
    return found


def report(trials: Sequence[Trial], base: dict[str, Any], out: Path, pattern_len: int, pattern_layers: int) -> str:
    """Write front.md, front.png and pattern-N.json into `out`; returns the table."""
    trained = [t for t in trials if t.get("long_gap") is not None]
    shown = placed(trained, base)
    chosen = sorted((shown[i] for i in front([objectives(t) for t in shown])), key=lambda t: (t["gap"], t["layout"]))
    lines = [
        f"{len(trials)} trials, {len(trained)} reached the last fidelity, {len(chosen)} places on the front; gaps"
        f" in nats on the trailing tokens after {base['climb']['long_steps']} steps,"
        " step and bytes as shares of dense's",
        "",
        "| file | pattern | layout | density | gap | step | bytes |",
        "|---|---|---|---|---|---|---|",
    ]
    by_name = {candidate.name: candidate for candidate in candidates()}
    for number, trial in enumerate(chosen, 1):
        candidate, layout = by_name[trial["name"]], trial["layout"]
        path = out / f"pattern-{number}.json"
        measured = {key: float(trial[key]) for key in ("density", "gap", "step_s", "bytes")}
        text = candidate.file(pattern_len, pattern_layers, layout, measured)
        path.write_text(text + "\n", encoding="utf-8")
        lines.append(
            f"| {path.name} | `{candidate.text(pattern_len, pattern_layers)}` | {layout} | {trial['density']:.3f} |"
            f" {trial['gap']:+.4f} | {trial['step_s']:.3f} | {trial['bytes']:.3f} |"
        )
    lines += ["", "Rank correlation of what a fidelity says with the gap of the last:", ""]
    lines += [f"- {what}: {value:.2f} over {num}" for what, value, num in correlations(trained)]
    text = "\n".join(lines) + "\n"
    (out / "front.md").write_text(text, encoding="utf-8")
    draw(shown, chosen, out / "front.png")
    return text


def objectives(trial: Trial) -> tuple[float, ...]:
    return tuple(float(trial[key]) for key in ("gap", "step_s", "bytes"))


def correlations(trained: Sequence[Trial]) -> list[tuple[str, float, int]]:
    """Rank correlation of each fidelity with the final gap, over trials that reached the last fidelity.

    Biased: trials that an early fidelity judged bad were stopped and are missing.
    """
    last = [float(t["long_gap"]) for t in trained]
    rows = {
        "plan, density (more is better)": [-float(t["density"]) for t in trained],
        "plan, attention mass of a dense model": [-float(t["mass"]) for t in trained],
        "kernel, step time (slower is better)": [-float(t["step_s"]) for t in trained],
        "short training, gap": [float(t["short_gap"]) for t in trained],
    }
    return [(what, rank_correlation(values, last), len(trained)) for what, values in rows.items()]


def draw(shown: Sequence[Trial], chosen: Sequence[Trial], path: Path) -> None:
    """Plot gap over step time; larger points are on the front, colour shows bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    best = {(t["name"], t["layout"]) for t in chosen}
    dots = axes.scatter(
        [t["step_s"] for t in shown],
        [t["gap"] for t in shown],
        c=[t["bytes"] for t in shown],
        s=[90 if (t["name"], t["layout"]) in best else 25 for t in shown],
        cmap="viridis",
        edgecolors="black",
        linewidths=0.5,
    )
    for trial in chosen:
        place = (trial["step_s"], trial["gap"])
        name = f"{trial['name']}, {trial['layout']}"
        axes.annotate(name, place, fontsize=6, xytext=(4, 4), textcoords="offset points")
    axes.axhline(0, color="grey", linewidth=0.5)
    axes.set_xlabel("CPU time of an attention call on the busiest rank, share of dense")
    axes.set_ylabel("gap to dense on trailing tokens, nats")
    figure.colorbar(dots, label="bytes, share of the dense ring")
    figure.savefig(path, dpi=120)
