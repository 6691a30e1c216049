"""Hold the forecast against every case with a known answer: the half that was fitted, the half that was not, and what
a null model says. Prints the table of docs/forecast.md.

    python benchmarks/forecast/score.py [--save]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.forecast.cases import Case, all_cases, model_of
from benchmarks.forecast.fit import assumed, errors, fit
from benchmarks.forecast.hours import CLASS_OF, DISTILLED, RUNS, fitted_half, left_out
from benchmarks.forecast.hours import fit as fit_hours
from benchmarks.forecast.kills import KEPT
from benchmarks.harness.results import RESULTS, show, table
from elastic_ring.cli.forecasts.seen import on_cores, scenario_of_run
from elastic_ring.cli.settings import parse
from elastic_ring.config import CpuOffload
from elastic_ring.forecast.goodput import DAY, HOUR, PRIORS, Failures, RunShape, goodput_with
from elastic_ring.forecast.renewal import CommonRandomNumbers, mean_goodput, simulate_goodput
from elastic_ring.forecast.sizing.machines import CLASSES, Z, around, named_fleet, quantiles
from elastic_ring.forecast.sizing.memory import RESERVED, RESERVED_EXPANDABLE
from elastic_ring.forecast.sizing.step_time import step_time
from elastic_ring.gpus import GPUS
from elastic_ring.model.config import num_parameters
from elastic_ring.model.memory import StepMemory

LOW_POWER = dataclasses.replace(
    GPUS["H100-80"], name="H100-96-500W", gib=89.4, peak_flops=912e12, hbm_bytes_s=2.4e12, host_watts=1000
)
"""G3's card: 2.4 TB/s; its peak lies between SXM and NVL, as its source says, so their mean."""
NULL_MFU, NULL_GOODPUT = 0.40, 0.90
THEN, NOW = "code of then", "code since 2026-11-27"
# (model, tokens of a rank, cp, cpu_offload, other settings, GiB of tensors, GiB reserved, code), of benchmarks/results,
# as they came. A ring of one had no copy to compute with then, 2 bytes a parameter. Those of 1b are of a head that a
# defect had cut off its embedding; that and Liger's loss are counted since, with these two in sight.
PEAKS: list[tuple[str, int, int, CpuOffload, dict[str, Any], float, float, str]] = [
    ("1b", 65_536, 1, "none", {}, 29.8, 38.5, THEN),
    ("1b", 65_536, 1, "none", {}, 29.8, 41.4, THEN),
    ("1b", 65_536, 1, "optimizer", {}, 22.4, 30.4, THEN),
    ("1b", 65_536, 1, "optimizer", {}, 22.4, 31.9, THEN),
    ("1b", 65_536, 1, "all", {}, 18.6, 25.3, THEN),
    ("1b", 65_536, 1, "all", {}, 18.6, 25.9, THEN),
    ("1b", 65_536, 2, "none", {}, 22.7, 30.3, THEN),
    ("8b", 65_536, 2, "none", {}, 110.1, 135.3, THEN),
    ("8b", 65_536, 2, "optimizer", {}, 80.2, 110.8, THEN),
    ("8b", 65_536, 2, "all", {}, 65.0, 84.1, THEN),
    ("hf", 8_192, 1, "none", {}, 21.6, 21.6, NOW),
    ("hf", 8_192, 1, "none", {"checkpoint_activations": False}, 30.8, 30.8, NOW),
    ("1b", 8_192, 1, "none", {"tie_embeddings": False}, 23.8, 23.8, NOW),
    ("experts", 8_192, 2, "none", {"experts": "send"}, 48.1, 52.8, NOW),
    ("experts", 8_192, 2, "none", {"experts": "gather"}, 51.1, 55.5, NOW),
    ("dense", 8_192, 2, "none", {}, 12.2, 17.3, NOW),
    ("experts", 65_536, 2, "none", {"experts": "gather"}, 71.3, 77.7, NOW),
    ("experts", 65_536, 2, "none", {"experts": "send"}, 74.0, 85.9, NOW),
    ("dense", 65_536, 2, "none", {}, 21.1, 24.5, NOW),
    ("1b", 8_192, 1, "none", {"tie_embeddings": False, "checkpoint_activations": False}, 30.2, 30.2, NOW),
]


@dataclass(frozen=True)
class Row:
    """One case: forecast, seen, whether its 80 % interval has it, and what the null model says."""

    name: str
    group: str
    forecast: float
    seen: float
    held: bool
    null: float | None = None

    @property
    def error(self) -> float:
        return self.forecast / self.seen - 1


def step_row(case: Case) -> Row:
    gpu = GPUS.get(case.gpu, LOW_POWER)
    eff = CLASSES[f"{case.software}/{gpu.arch}"]
    found = float(step_time(case.job, gpu, eff).total_s)
    held = abs(math.log(found / case.seen_s)) <= Z * eff.spread
    null = case.job.flops / (NULL_MFU * gpu.peak_flops)
    group = f"{case.name[:2]} step, {'fitted' if case.fitted else 'reported'}"
    return Row(case.name, group, found, case.seen_s, held, null)


def memory_rows() -> list[Row]:
    rows = []
    for index, (name, tokens, cp, offload, other, live, reserved, code) in enumerate(PEAKS):
        config = model_of(name)
        sizes = {key: value for key, value in other.items() if key != "experts"}
        config = dataclasses.replace(config, **sizes)
        number, experts = num_parameters(config), other.get("experts", "auto")
        memory = StepMemory(config, number, cp, tokens, 2, offload, experts=experts)
        gib = memory.device_bytes / 2**30
        half = "fitted" if index % 2 == 0 else "reported"
        most = 139.8 - 0.8
        shares = RESERVED_EXPANDABLE if code == NOW else RESERVED  # as the benches of these set it
        low, middle, high = (min(gib * share, most) for share in shares)
        told = f"G9 {name} {tokens} cp {cp} {offload} {' '.join(map(str, other.values()))}".rstrip()
        held = abs(gib / live - 1) < 0.03
        rows.append(Row(f"{told} tensors", f"G9 memory, tensors, {code}", gib, live, held))
        rows.append(Row(f"{told} reserved", f"G9 memory, reserved, {half}", middle, reserved, low <= reserved <= high))
    return rows


HOURS_SPREAD = 0.04
"""Of published GPU-hours: the 80th percentile of those left out, over 1.28."""


def measured_hour_rows() -> list[Row]:
    """Where a case tells a rate, as `--measured-step` takes it: 380 token/s; 400 TFLOP/s and 90 % of the time."""
    flop = (6 * 405.9e9 + 6.0 * 8192 * 16_384 * 126) * 15.6e12
    return [
        Row("G4 Llama 65B by its 380 token/s", "G4, G8 by a measured rate", 1.4e12 / 380 / 3600, 1_022_362, True),
        Row("G8 405B by its 400 TFLOP/s", "G4, G8 by a measured rate", flop / 400e12 / 3600 / 0.9, 30.84e6, True),
    ]


OPT_DAYS = 56


def goodput_rows() -> list[Row]:
    """G5: losses and > 90 % of Llama-3 405B, which restarted from checkpoints, with a switch for each rack of two
    hosts (arXiv:2407.21783, 3.3.1). The cases tell no time of a restart; 8 minutes are assumed, and a checkpoint
    every 10. G6: 33 days of work on 1,024 from November 11th to January 6th, in 90 restarts by hand, each of "hours"
    (1, 3 and 8 assumed), with a day without a cluster."""
    llama = RunShape(1, 16_000, 384, 8, 2, 128, 18.0, 0.0, 480.0, 60.0, 600.0, 4.0, 60.0)
    failures = Failures("llama3", PRIORS["llama3"].gpu_hours, (6.0, 1.0))
    losses = 54 * 24 * llama.num_gpus / failures.gpu_hours[1]
    rng = np.random.default_rng(0)
    hours = around(3.0, math.log(8 / 3) / Z).draw(10_000, rng)
    opt = RunShape(1, 992, 96, 8, 32, 128, 20.0, 0.0, hours * HOUR, 300.0, 3600.0, 60.0, 600.0)
    restarts = 33 * 24 * opt.num_gpus / PRIORS["opt"].gpu_hours[1]
    known = dataclasses.replace(PRIORS["opt"], gpu_hours=(992 * OPT_DAYS * 24 / 90,) * 3)
    hours_between, numbers = np.full(len(hours), known.gpu_hours[1]), CommonRandomNumbers(rng, len(hours))
    at_work = simulate_goodput(opt, known, hours_between, OPT_DAYS * DAY, numbers) * (1 - 1 / OPT_DAYS)
    low, middle, high = quantiles(np.asarray(at_work))
    seen = 33 / OPT_DAYS * 1024 / 992
    [of_llama] = mean_goodput([llama], failures, [failures.gpu_hours[1]], [1.0])
    return [
        Row("G5 losses in 54 days", "G5, G6 losses", losses, 419, True),
        Row("G5 effective time (seen: above 0.90)", "G5 goodput", of_llama, 0.90, True),
        Row("G6 losses in 33 days", "G5, G6 losses", restarts, 66, True),
        Row(f"G6 time at work, 80 %: {low:.2f} to {high:.2f}", "G6 goodput", middle, seen, low <= seen <= high),
    ]


KILLS = ("1b-2x1-fifty", "1b-2x1-survivor", "1b-2x1")
"""Series of kills of one rank of two on H200s since heals connect beside the groups; the 1st is fitted."""
KILLED_STEP_S, STEPS_BETWEEN = 0.28, 15
"""A step of theirs, and how many `chaos.py` leaves between two kills."""


def kill_rows() -> list[Row]:
    """Goodput of preset 1b that loses a process every fifteen steps, by what its recoveries took: a mean of a series,
    and half a step that broke off. A soak's rate, thousands of times that of a fleet."""
    rows = []
    for index, name in enumerate(KILLS):
        path = RESULTS / "recovery" / f"bench_recovery_gpu-{name}-2026-11-22.json"
        kills = json.loads(path.read_text(encoding="utf-8"))["kills"]
        parts = [np.mean([kill[part] for kill in kills]) for part in ("detect_s", "close_s", "heal_s", "rerun_s")]
        lost_s = float(sum(parts)) - KILLED_STEP_S / 2
        kept_s = STEPS_BETWEEN * KILLED_STEP_S
        asked = parse(["--preset", "1b", "--dp", "2", "--cp", "1", "--global-batch", "2", "--context", "8192"])
        scenario = scenario_of_run(asked, named_fleet("h200"))
        shape = scenario.shape(scenario.medians(), KILLED_STEP_S)
        found = goodput_with(shape, kept_s, {"process": 1})
        seen, half = kept_s / (kept_s + lost_s), "fitted" if index == 0 else "reported"
        rows.append(Row(f"G9 kills {name}", f"G9 goodput of kills, {half}", found, seen, abs(found - seen) <= 0.005))
    return rows


def own_run_rows() -> list[Row]:
    """Goodput of whole runs by their losses (`kills.py`), on CPUs that others used too. Where in a step one falls is
    chance: a uniform share of it breaks off."""
    rows = []
    for name, told in json.loads(KEPT.read_text(encoding="utf-8")).items():
        train, alone_s = parse(told["train"]), told["alone_step_s"]
        if train.scaling.device == "cuda":
            scenario = scenario_of_run(train, named_fleet(told["fleet"]))
        else:
            scenario = dataclasses.replace(on_cores(train, told["cores"]), alone_step_s=alone_s)
        shape = scenario.shape(scenario.medians(), told["step_s"])
        shape = dataclasses.replace(shape, step_s=told["mean_step_s"])
        found, seen = goodput_with(shape, told["kept_s"], told["losses"]), told["goodput"]
        by_chance = math.sqrt(sum(told["losses"].values()) / 12) * told["mean_step_s"] / told["kept_s"]
        held = abs(found - seen) <= max(0.005, Z * by_chance)
        rows.append(Row(f"G9 {name}, by chance {by_chance:.4f}", "G9 goodput of runs under kills", found, seen, held))
    return rows


def hour_rows() -> list[Row]:
    """Fitted to half of the runs on each kind of GPU."""
    rows = []
    for gpu in CLASS_OF:
        half = fitted_half(gpu)
        beside = fit_hours(half)
        for run in [*RUNS, *DISTILLED]:
            if run.gpu != gpu:
                continue
            found, null = beside.hours(run), run.flops / (NULL_MFU * GPUS[gpu].peak_flops) / 3600 / NULL_GOODPUT
            kind = "fitted" if run in half else "distilled" if run in DISTILLED else "reported"
            held = abs(math.log(found / run.hours)) <= HOURS_SPREAD * Z
            rows.append(Row(run.name, f"{gpu[:4]} GPU-hours, {kind}", found, run.hours, held, null))
    return rows


def left_out_rows() -> list[tuple[str, bool]]:
    """Whether each case lies in an 80 % interval that knows all others of its kind and not itself: (group, held)."""
    cases = all_cases()
    found = [(row.group[:2], row.held) for row in map(step_row, cases) if row.group[:2] in ("G1", "G3")]
    for name in ("fsdp-fa2/hopper", "fsdp-fa2/ampere", "elastic-ring/hopper"):
        software, arch = name.split("/")
        mine = [c for c in cases if c.software == software and c.gpu in GPUS and GPUS[c.gpu].arch == arch]
        for case in mine:
            others = [other for other in mine if other is not case]
            eff = fit(others, assumed(name), CLASSES[name], rounds=4)
            found.append((case.name[:2], _holds(errors([case], eff)[0], errors(others, eff))))
    hours = left_out(RUNS)
    for name, off in hours.items():
        found.append(("hours", _holds(off, [one for other, one in hours.items() if other != name])))
    reserved = [row.seen / row.forecast for row in memory_rows() if "reserved" in row.group]
    for code in (THEN, NOW):
        shares = [share for share, peak in zip(reserved, PEAKS, strict=True) if peak[-1] == code]
        for index, share in enumerate(shares):
            low, high = np.quantile(shares[:index] + shares[index + 1 :], (0.1, 0.9))
            found.append(("memory", bool(low <= share <= high)))
    return found


def _holds(off: float, others: Sequence[float]) -> bool:
    """As the spread of a class is made: the 80th percentile, at least what two hosts differ by."""
    return abs(off) <= max(float(np.quantile(np.abs(others), 0.8)), 0.035 * Z)


def summary(rows: Sequence[Row]) -> str:
    lines = []
    for group in dict.fromkeys(row.group for row in rows):
        mine = [row for row in rows if row.group == group]
        off = np.abs([row.error for row in mine])
        null = [abs(row.null / row.seen - 1) for row in mine if row.null is not None]
        holds = f"{np.mean([row.held for row in mine]):.0%}"
        sizes = [f"{one:.1%}" for one in (off.mean(), np.median(off), off.max())]
        lines.append([group, len(mine), *sizes, holds, f"{np.mean(null):.1%}" if null else None])
    return table(["cases", "number", "mean", "median", "worst", "interval holds", "null model's mean"], lines)


def all_rows() -> list[Row]:
    return [
        *map(step_row, all_cases()),
        *memory_rows(),
        *hour_rows(),
        *measured_hour_rows(),
        *goodput_rows(),
        *kill_rows(),
        *own_run_rows(),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/forecast/score.txt")
    asked = parser.parse_args()
    rows = all_rows()
    told = [
        f"{row.name:<60} {row.forecast:>12.4g} {row.seen:>12.4g} {row.error:>+7.1%} {'' if row.held else 'missed'}"
        for row in rows
    ]
    known = left_out_rows()
    by_group = [f"{group} {np.mean(mine):.0%} of {len(mine)}" for group, mine in _grouped(known).items()]
    share = np.mean([held for _, held in known])
    told += ["", summary(rows), "", "80 % intervals, each case left out of the fit, hold", "  " + ", ".join(by_group)]
    text = "\n".join([*told, f"  all: {share:.0%} of {len(known)}"])
    show(text)
    if asked.save:
        (RESULTS / "forecast").mkdir(exist_ok=True)
        (RESULTS / "forecast" / "score.txt").write_text(text + "\n", encoding="utf-8")


def _grouped(known: Sequence[tuple[str, bool]]) -> dict[str, list[bool]]:
    return {group: [held for one, held in known if one == group] for group in dict.fromkeys(one for one, _ in known)}


if __name__ == "__main__":
    main()
