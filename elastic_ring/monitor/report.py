"""A run as text: one sentence per recovery, and the state of a live or ended run from its folder.

Reads files and returns text. Calls to a coordinator must not enter this module: status must work without one. The plot
is in `plot`, the live progress line in `progress`.
"""

from __future__ import annotations

import errno
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import cast

from elastic_ring.control.decisions.detectors import DATA_LIMIT, TOLD_AFTER
from elastic_ring.errors import JournalDamaged, RecordDamaged
from elastic_ring.monitor.callbacks import STOPPED_BY_USER
from elastic_ring.monitor.goodput import CLOCK_PARTS
from elastic_ring.monitor.journal import Flaw, Lines, opened
from elastic_ring.monitor.json_files import read_json
from elastic_ring.monitor.metrics import (
    CONFIG_NAME,
    JOURNAL_NAME,
    METRICS_NAME,
    STATUS_NAME,
    SUMMARY_NAME,
    WATCHED_S,
    MetricsLine,
    Recovery,
    StatusFile,
    StatusOfWorker,
    SummaryFile,
    changed_status,
)

_PARTS = ("detect", "close", "heal", "rerun")
_NUM_RECOVERIES_SHOWN = 5
_FORECAST_IS_RIGHT = 0.1
"""A larger difference, as a share of the planned memory, is reported."""
_STALE_S = 10.0
_NUM_PACED, _BREAK = 64, 20
"""Steps that make the pace; an interval above 20 times their median is a break."""
MAX_FLAWS_NAMED = 3
"""Damaged lines of a file that are named."""


def recovery_line(recovery: Recovery) -> str:
    """One sentence, for example `rank 3 died in backward of step 21; spare took its place in 0.4 s: detect 0.02, close
    0.11, heal 0.05, rerun 0.2; no step lost`. Omits phases that did not happen (None).
    """
    cause = recovery.cause
    if "step" not in cause:
        cause += f" of step {recovery.step}" if " in " in cause else f" in step {recovery.step}"
    done = f"{recovery.action} in {seconds(recovery.total_s)} s"
    parts = [f"{part} {seconds(s)}" for part in _PARTS if (s := getattr(recovery, f"{part}_s")) is not None]
    if parts:
        done += f": {', '.join(parts)}"
    num_undone = recovery.steps_undone
    lost = f"{num_undone} step{'s' if num_undone > 1 else ''} undone" if num_undone else "no step lost"
    return "; ".join([cause, done, lost])


TIME_NAMES = {
    "startup": "start",
    "waiting": "waiting",
    "validation": "validation",
    "checkpoint": "checkpoints",
    "recovery": "recoveries",
    "rerun": "steps broken off",
    "undone": "steps undone",
    "resize": "changes of the mesh",
    "other": "compiling, writing the weights and other",
}
_LEAST_S, _LEAST_SHARE = 0.5, 0.01


def goodput_line(summary: SummaryFile) -> str:
    """For example `goodput 43% of 72 s; the rest: start 31 s, checkpoints 2 s`."""
    parts: Mapping[str, float] = summary.get("time_s", {})
    total_s, line = math.fsum(parts.values()), "goodput unknown"
    if summary["goodput"] is not None:
        line = f"goodput {summary['goodput']:.0%}"
    shown = [(s, TIME_NAMES[part]) for part, s in parts.items() if part in TIME_NAMES]
    shown = sorted(part for part in shown if part[0] >= max(_LEAST_S, _LEAST_SHARE * total_s))[::-1]
    rest = ", ".join(f"{name} {seconds(s)} s" for s, name in shown)
    return f"{line} of {seconds(total_s)} s" + (f"; the rest: {rest}" if rest else "")


def seconds(value_s: float | None) -> str:
    """A duration in seconds with about two digits: 0.003, 0.02, 0.4, 1.2, 34."""
    if value_s is None:
        return "?"
    digits = 3 if value_s < 0.01 else 2 if value_s < 1 else 1 if value_s < 10 else 0
    text = f"{value_s:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def render_status(
    run_folder: str | Path, *, now_unix_s: float | None = None, look: Callable[[], Path] | None = None
) -> str:
    """The known state of a run: phase, mesh, generation, step, members, spares, last recoveries.

    `look` brings the folder up to date: a status that is old, or from the future, counts as live where it changes, as
    clocks of two hosts differ. Names damaged files, and shows the rest. Raises: ValueError when the folder is
    missing or is no run's.
    """
    folder = Path(run_folder)
    if not folder.is_dir():
        raise ValueError(f"run folder {folder}: there is no such folder; give the --run-dir of a run")
    records = Records.of(folder)
    status, summary = records.status, records.summary
    if not (status or summary or records.steps or records.damaged or (folder / JOURNAL_NAME).exists()):
        files = f"{STATUS_NAME}, {JOURNAL_NAME} or {SUMMARY_NAME}"
        raise ValueError(f"run folder {folder}: holds no {files}; give the --run-dir of a run")
    now = time.time() if now_unix_s is None else now_unix_s
    news = cache(lambda: _news_of(status, now, look))
    sections: tuple[Callable[[], Iterable[str]], ...] = (
        lambda: [_state_line(folder, status, summary, news)],
        lambda: _versions_lines(folder / CONFIG_NAME),
        lambda: [_mesh_line(status, summary)],
        lambda: [_step_line(records)],
        lambda: _newest_step_lines(records),
        lambda: _delay_lines(status),
        lambda: _membership_lines(status, news),
        lambda: _memory_lines(folder / CONFIG_NAME, status, summary),
        lambda: _recovery_lines(list(status.get("recoveries") or summary.get("recoveries") or [])),
        lambda: _summary_lines(summary),
        lambda: [_row("decision", records.decision)] if records.decision else [],
        lambda: [_row("damaged", reason) for reason in records.damaged],
    )
    lines: list[str] = []
    for section in sections:
        try:
            lines += section()
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            lines.append(_row("damaged", f"a record with unexpected content ({type(error).__name__}: {error})"))
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Records:
    """The intact part of a run's records, and what is wrong with each damaged file.

    `steps`: the newest lines of metrics.jsonl. `validated`: the newest with a validation. `curves`: lines from the
    first to the last, of which a long run has more. `decision`: the reason of the newest journal line with commands;
    lines without commands only note an event.
    """

    status: StatusFile
    summary: SummaryFile
    num_steps: int
    steps: Sequence[MetricsLine]
    validated: MetricsLine | None
    curves: Sequence[MetricsLine]
    decision: str
    damaged: tuple[str, ...]

    @classmethod
    def of(cls, folder: Path, *, most_lines: int = 0) -> Records:
        """`most_lines`: of the curves. Raises: OtherFormat."""
        from elastic_ring.monitor.metrics_log import StepTable

        damaged: list[str] = []

        def content(name: str) -> object:
            try:
                return read_json(folder / name) or {}
            except (RecordDamaged, OSError) as error:
                damaged.append(str(error))
                return {}

        @contextmanager
        def lines(name: str) -> Iterator[list[Flaw]]:
            flaws = list[Flaw]()
            try:
                yield flaws
            except (RecordDamaged, JournalDamaged) as error:
                damaged.append(error.message)
            damaged.extend(f"line {flaw.line} of {folder / name}" for flaw in flaws[:MAX_FLAWS_NAMED])
            if len(flaws) > MAX_FLAWS_NAMED:
                damaged.append(f"{len(flaws) - MAX_FLAWS_NAMED} more lines of {folder / name}")

        status, summary = cast(StatusFile, content(STATUS_NAME)), cast(SummaryFile, content(SUMMARY_NAME))
        num_steps, steps, validated, curves, decision = 0, list[MetricsLine](), None, list[MetricsLine](), ""
        with lines(METRICS_NAME) as flaws, StepTable.load(folder / METRICS_NAME, flaws) as table:
            num_steps, steps = table.last_step + 1, table.newest(_NUM_PACED)
            curves = table.sample(most_lines) if most_lines else []
            validated = next(table.lines(at), None) if (at := table.rows.newest("validated")) >= 0 else None
        path = folder / JOURNAL_NAME
        with suppress(FileNotFoundError), lines(JOURNAL_NAME) as flaws, opened(path) as file:
            for line in Lines(file, path, flaws):
                decision = str(line.record.get("reason") or "-") if line.record.get("commands") else decision
        return cls(status, summary, num_steps, steps, validated, curves, decision, tuple(damaged))


def _state_line(folder: Path, status: StatusFile, summary: SummaryFile, news: Callable[[], tuple[float, bool]]) -> str:
    name = status.get("run") or folder.resolve().name
    if error := status.get("error"):
        return f"run {name}: {'' if error == STOPPED_BY_USER else 'failed: '}{error}"
    if status.get("ended") or (summary and not status):
        return f"run {name}: ended"
    if not status:
        return f"run {name}: state unknown, its {STATUS_NAME} is missing or cannot be read"
    state = f"run {name}: {status.get('phase', 'running')}"
    age_s, is_silent = news()
    if is_silent:
        silent = f"no news for {max(WATCHED_S, age_s):.0f} s"
        return f"{state}, but {silent}: its coordinator {_waits_for_disk(folder)}is gone or stuck"
    if abs(age_s) > _STALE_S:
        return f"{state}, with news; its host's clock is {abs(age_s):.0f} s {'behind' if age_s > 0 else 'ahead'}"
    return f"{state}, news of {max(0.0, age_s):.1f} s ago"


def _waits_for_disk(folder: Path) -> str:
    """What a coordinator may wait for that cannot write its status; empty where this host could."""
    fault = "" if os.statvfs(folder).f_bavail else "is full"
    try:
        os.close(os.open(folder / STATUS_NAME, os.O_WRONLY | os.O_CLOEXEC))
    except OSError as error:  # mount flags may not say that a file system went read-only after an error
        fault = "is read-only" if error.errno == errno.EROFS else fault
    return f"waits for the disk, which {fault}, or " if fault else ""


def _news_of(status: StatusFile, now: float, look: Callable[[], Path] | None) -> tuple[float, bool]:
    """How old the status is by this host's clock, and whether the coordinator is silent."""
    age_s = now - float(status.get("updated_unix_s", now))
    if look is None or abs(age_s) <= _STALE_S:
        return age_s, age_s > _STALE_S
    return age_s, changed_status(status, look) is None


def _versions_lines(config: Path) -> list[str]:
    """The recorded versions. An unreadable config is reported here and does not fail the status."""
    try:
        versions = (read_json(config) or {}).get("versions", {})
    except (OSError, RecordDamaged) as error:
        return [_row("versions", f"{CONFIG_NAME} cannot be read ({error})")]
    if not isinstance(versions, Mapping) or not versions:
        return []
    return [_row("versions", ", ".join(f"{name} {version}" for name, version in versions.items()))]


def _mesh_line(status: StatusFile, summary: SummaryFile) -> str:
    generations = [*summary.get("generations", ())][-1:]
    newest = status or (generations[0] if generations else {})
    mesh = newest.get("mesh")
    absent = "none any more" if status.get("ended") else "none yet"
    shape = f"dp={mesh['dp']} x cp={mesh['cp']}" if mesh and mesh["dp"] else absent
    term, generation = newest.get("term", "?"), newest.get("generation", "?")
    return _row("mesh", f"{shape}   generation {generation}   term {term}")


def _step_line(records: Records) -> str:
    status, summary, steps = records.status, records.summary, records.steps
    total = status.get("total_steps") or summary.get("steps")
    step = status.get("step", summary.get("steps", records.num_steps))
    text = f"{step} of {total}" if total is not None else str(step)
    if steps:
        last = steps[-1]
        loss = "not finite" if last.get("loss") is None else f"{last['loss']:.4f}"
        text += f"   loss {loss} (step {last['step']})"
        rate = newest_rate(steps)
        text += f"   {rate} tokens/s" if rate else ""
        left = None if total is None or status.get("ended") else left_s(steps, int(total) - int(step))
        text += "" if left is None else f"   {duration(left)} left"
    return _row("step", text)


def newest_rate(steps: Sequence[MetricsLine]) -> str:
    """Tokens a second, the mean of the last five steps; empty where they have none."""
    rates = [rate for line in steps[-5:] if (rate := line.get("tokens_per_s")) is not None]
    return human_rate(math.fsum(rates) / len(rates)) if rates else ""


def _newest_step_lines(records: Records) -> Iterable[str]:
    """Rates of the newest step, and results of the newest validation, the means of all sets first."""
    steps, validated = records.steps, cast("Mapping[str, float | None]", records.validated or {})
    if steps and steps[-1].get("lr") is not None:
        norm, load = steps[-1].get("grad_norm"), steps[-1].get("expert_load_max")
        text = f"learning rate {steps[-1]['lr']:.3g}   gradient norm {'not finite' if norm is None else f'{norm:.3g}'}"
        yield _row("rates", text + ("" if load is None else f"   fullest expert {load:.2f} times its fair share"))
    if "val_perplexity" in validated:
        metrics = {name.removeprefix("val_"): value for name, value in validated.items() if name.startswith("val_")}
        texts = (f"{name} {'not finite' if value is None else f'{value:.4g}'}" for name, value in metrics.items())
        yield _row("validated", f"{', '.join(texts)} (step {validated['step']})")


def _delay_lines(status: StatusFile) -> Iterable[str]:
    """Overdue checkpoints, and waits for data."""
    num_missed = int(status.get("checkpoint_intervals_missed", 0))
    if num_missed >= TOLD_AFTER:
        yield _row("saved", f"no checkpoint for {num_missed} intervals, since step {status['checkpoint_step']}")
    share = float(status.get("data_wait_share", 0.0))
    if share >= DATA_LIMIT:
        yield _row("data", f"waited for in {share:.0%} of the last steps' time")


def left_s(steps: Sequence[MetricsLine], num_left: int) -> float | None:
    """Seconds for `num_left` steps at the pace of the last 64, validations and checkpoints included, breaks (before a
    resume) left out. None without a pace or without steps left."""
    times = [line["unix_s"] for line in steps[-_NUM_PACED:] if line.get("unix_s") is not None]
    intervals_s = [later - earlier for earlier, later in pairwise(times)]
    if not intervals_s or num_left < 1:
        return None
    longest_s = _BREAK * statistics.median(intervals_s)
    paced = [interval_s for interval_s in intervals_s if 0 <= interval_s <= longest_s]  # a clock may go back
    return num_left * math.fsum(paced) / len(paced) if paced else None


def duration(value_s: float) -> str:
    """For people: 40 s, 12 min, 3.5 h, 2.1 days."""
    for limit, size, unit in ((90, 1, "s"), (5400, 60, "min"), (172_800, 3600, "h")):
        if value_s < limit:
            return f"{value_s / size:.{1 if unit == 'h' and value_s < 36_000 else 0}f} {unit}"
    return f"{value_s / 86_400:.1f} days"


def human_rate(value: float) -> str:
    """A rate with three digits: 950, 12.3k, 4.56M."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            scaled = value / limit
            return f"{scaled:.{2 if scaled < 10 else 1 if scaled < 100 else 0}f}{unit}"
    return f"{value:.0f}"


def _membership_lines(status: StatusFile, news: Callable[[], tuple[float, bool]]) -> Iterable[str]:
    if status.get("ended"):
        yield _row("members", "none any more")
        return
    members = sorted(status.get("members") or [], key=lambda member: int(member["global_rank"]))
    for index, member in enumerate(members):
        text = f"rank {member['global_rank']:<3} {member['worker']}   node {member['node']}   pid {member['pid']}"
        yield _row("members" if index == 0 else "", text)
    yield from _clock_lines(members)
    if status:
        spares = status.get("spares") or []
        names = [str(spare["worker"] if isinstance(spare, dict) else spare) for spare in spares]
        yield _row("spares", ", ".join(names) or "none: the next failure makes the mesh smaller")
        if covered := status.get("covered"):
            yield _row("failure of", "; ".join(f"{loss}: {outcome}" for loss, outcome in covered.items()))
        if news()[1]:
            yield _row("", "members and spares are those of the last news, and may be gone")


def _clock_lines(members: Sequence[StatusOfWorker]) -> Iterable[str]:
    """The newest step's time by part: the mean over the ranks, and the rank on which the part took longest."""
    clocks = {member["global_rank"]: member["clock"] for member in members if member.get("clock")}
    if not clocks:
        return
    texts = []
    for part in CLOCK_PARTS:
        longest = max(clocks, key=lambda rank: float(clocks[rank].get(part, 0.0)))
        mean_s = math.fsum(clock.get(part, 0.0) for clock in clocks.values()) / len(clocks)
        if (longest_s := clocks[longest].get(part, 0.0)) >= 0.0005:  # runs of earlier versions lack some
            texts.append(f"{part} {seconds(mean_s)} (rank {longest}: {seconds(longest_s)})")
    yield _row("clock", f"{', '.join(texts)}   s a step, mean and longest")


def forecast_line(planned_bytes: int | None, peak_bytes: int) -> str:
    """The measured peak of a GPU's tensors beside the planned one; empty without a measurement."""
    if not peak_bytes:
        return ""
    peak = f"peak {peak_bytes / 2**30:.1f} GiB of tensors"
    if not planned_bytes:
        return peak
    off = peak_bytes / planned_bytes - 1
    text = f"{peak}, planned {planned_bytes / 2**30:.1f} GiB"
    if abs(off) <= _FORECAST_IS_RIGHT:
        return text
    return f"{text}: {abs(100 * off):.0f} % {'more' if off > 0 else 'less'} than planned"


def _memory_lines(config: Path, status: StatusFile, summary: SummaryFile) -> Iterable[str]:
    """Peaks of GPU memory and of the workers' host memory."""
    try:
        planned = (read_json(config) or {}).get("planned_gpu_bytes")
    except (OSError, RecordDamaged):  # reported by the versions' line
        planned = None
    if text := forecast_line(planned, int((status or summary).get("peak_gpu_bytes", 0))):
        yield _row("GPU memory", text)
    workers = [*(status.get("members") or []), *(status.get("spares") or [])]
    peaks = [
        worker["peak_rss_bytes"] for worker in workers if isinstance(worker, Mapping) and "peak_rss_bytes" in worker
    ]
    if peaks:
        yield _row("memory", f"peak {max(peaks) / 2**30:.2f} GiB of a worker's process")


def _recovery_lines(recoveries: Sequence[Mapping[str, object]]) -> Iterable[str]:
    if not recoveries:
        yield _row("recoveries", "none")
    hidden = len(recoveries) - _NUM_RECOVERIES_SHOWN
    if hidden > 0:
        yield _row("recoveries", f"{len(recoveries)}, the last {_NUM_RECOVERIES_SHOWN}:")
    for index, recovery in enumerate(recoveries[-_NUM_RECOVERIES_SHOWN:]):
        yield _row("recoveries" if index == 0 and hidden <= 0 else "", recovery_line(Recovery.from_json(recovery)))


def _summary_lines(summary: SummaryFile) -> Iterable[str]:
    if summary:
        changed = " (the mesh changed)" if summary.get("mesh_changed") else ""
        exact = "yes" if summary["exact"] else f"not promised{changed}"
        goodput = "unknown" if (ratio := summary["goodput"]) is None else f"{100 * ratio:.1f} %"
        yield _row("goodput", f"{goodput}   exact: {exact}")
        yield _row("weights", f"sha256 {summary['weights_sha256']}")


def _row(title: str, text: str) -> str:
    return f"  {title:<11}{text}"
