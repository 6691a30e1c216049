"""What a run leaves in numbers: one line a committed step, its goodput, and the summary at the end.

Only what will never be undone is written here: a step's line comes once the next step is under way.
Drawing and wording are in `report`; shipping metrics to a store must not enter this module.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from elastic_ring.errors import RunFailed
from elastic_ring.mesh import Mesh
from elastic_ring.monitor.journal import Journal, read, sync_directory

log = logging.getLogger(__name__)

METRICS_NAME = "metrics.jsonl"
SUMMARY_NAME = "summary.json"
STATUS_NAME = "status.json"
JOURNAL_NAME = "journal.jsonl"
CONFIG_NAME = "config.json"

SUMMARY_KEYS = (
    "steps", "losses", "weights_sha256", "samples_sha256", "goodput", "exact", "generations", "recoveries",
)  # fmt: skip
GENERATION_KEYS = ("term", "generation", "mesh", "reason")
RECOVERY_KEYS = (
    "step", "faults", "cause", "action", "detect_s", "close_s", "heal_s", "rerun_s", "total_s",
    "steps_undone", "steps_rerun", "survivor_pids_kept", "exact",
)  # fmt: skip


@dataclass(frozen=True)
class StepMetrics:
    """One committed step. `loss` is the mean over its tokens, `step_s` its own time on global rank 0.

    Of that rank's K/V hops: `hop_bytes` is what it sent, `exposed_hop_wait_s` the time spent waiting with nothing to
    compute (on CPUs the host's, on GPUs that of the kernels' stream), `hop_latency_mean_s` and `hop_latency_p99_s` are
    over the step's exchanges, from free to start until arrived, on GPUs only. On GPUs the three times are measured in
    one step of ten (`attention.ledger.EVENT_STEPS`); None where nothing was measured.

    A step with a non-finite gradient is `skipped`; its loss may be nan. `samples` is the digest of what was consumed,
    `val_loss` that of the held-out sequences where they were looked at, `committed_monotonic_s` when it was applied, on
    the monotonic clock of the publishing rank's host."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    tokens_per_s: float
    step_s: float
    skipped: bool
    generation: int
    mesh: Mesh
    num_members: int
    hop_bytes: int = 0
    exposed_hop_wait_s: float | None = None
    hop_latency_mean_s: float | None = None
    hop_latency_p99_s: float | None = None
    samples: str = ""
    val_loss: float | None = None
    committed_monotonic_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Valid JSON for any reader: a float that is not finite is null, except in `loss_hex`."""
        flat = asdict(self)
        flat["loss_hex"] = float(self.loss).hex()
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in flat.items()
        }

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> StepMetrics:
        """The inverse of `to_json`, the loss bit for bit. Raises: KeyError, TypeError."""
        values = {field.name: line[field.name] for field in fields(cls) if field.name in line}
        for field in fields(cls):
            if field.type == "float" and values.get(field.name, 0.0) is None:
                values[field.name] = math.nan
        values["loss"] = float.fromhex(line["loss_hex"])
        values["mesh"] = Mesh(**line["mesh"])
        return cls(**values)


class MetricsLog:
    """DIR/metrics.jsonl, one line a committed step, each step once however often it is reported."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory) / METRICS_NAME
        self._journal = Journal(self.path, durable=False)
        self._by_step: dict[int, tuple[str, float]] = {}  # step -> (loss_hex, step_s)
        self._last_step = -1
        self._validated: set[int] = set()

    def open(self) -> MetricsLog:
        """Go on with what is there. Raises JournalDamaged."""
        self._journal.open()
        lines = list(read(self.path))
        self._by_step = {line["step"]: (line["loss_hex"], line["step_s"]) for line in lines if "loss_hex" in line}
        self._validated = {line["step"] for line in lines if "loss_hex" not in line}
        self._last_step = max(self._by_step, default=-1)
        return self

    @property
    def last_step(self) -> int:
        """The newest step that is written, -1 for none."""
        return self._last_step

    def record(self, metrics: StepMetrics) -> bool:
        """Write a step; False if it is there already (a new coordinator hears of the last ones again).

        Raises: RunFailed when it is there with another loss: then something published has been undone.
        """
        line = metrics.to_json()
        known = self._by_step.get(metrics.step)
        if known is not None:
            if known[0] != line["loss_hex"]:
                raise RunFailed(
                    f"step {metrics.step} was published with loss {known[0]} and now has {line['loss_hex']}",
                    step=metrics.step,
                )
            return False
        self._journal.append({**line, "unix_s": round(time.time(), 3)})
        self._by_step[metrics.step] = (line["loss_hex"], metrics.step_s)
        self._last_step = max(self._last_step, metrics.step)
        return True

    def validated(self, step: int, val_loss: float) -> None:
        """Write what the held-out sequences gave after `step`, once: a line of its own, which may come before the
        step's, because the ring validates before it goes on and may break off in between."""
        if step not in self._validated:
            self._validated.add(step)
            self._journal.append({"step": step, "val_loss": val_loss if math.isfinite(val_loss) else None})

    def losses_hex(self) -> list[str]:
        """One a step from 0 on. Raises: RunFailed naming the first step that is missing."""
        for step in range(len(self._by_step)):
            if step not in self._by_step:
                raise RunFailed(f"{self.path} has no line for step {step}", step=step)
        return [self._by_step[step][0] for step in range(len(self._by_step))]

    def step_times_s(self) -> dict[int, float]:
        """For `Goodput`, after a restart."""
        return {step: step_s for step, (_, step_s) in sorted(self._by_step.items())}

    def close(self) -> None:
        self._journal.close()

    def __enter__(self) -> MetricsLog:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """One mapping a committed step, in order, with `val_loss` where the ring validated after it; none before the
    first step. Raises JournalDamaged."""
    lines = list(read(Path(directory) / METRICS_NAME))
    validated = {line["step"]: line["val_loss"] for line in lines if "loss_hex" not in line}
    steps = [{**line, **({"val_loss": validated[line["step"]]} if line["step"] in validated else {})}
             for line in lines if "loss_hex" in line]  # fmt: skip
    return sorted(steps, key=lambda line: int(line["step"]))


class Goodput:
    """Time spent on steps that stayed committed ÷ total time. Times come in, on one clock of the caller."""

    def __init__(self, start_s: float, step_times_s: Mapping[int, float] | None = None) -> None:
        self._start_s = start_s
        self._kept_s: dict[int, float] = dict(step_times_s or {})

    def committed(self, step: int, step_s: float) -> None:
        """`step` took `step_s` in the attempt that was committed; attempts that were not count as loss."""
        self._kept_s[step] = step_s

    def undone(self, first_step: int) -> int:
        """`first_step` and all after it were taken back; returns how many committed steps that undid."""
        gone = [step for step in self._kept_s if step >= first_step]
        for step in gone:
            del self._kept_s[step]
        return len(gone)

    def ratio(self, now_s: float) -> float:
        """Between 0 and 1; 0 before any time has passed."""
        total_s = now_s - self._start_s
        return min(1.0, math.fsum(self._kept_s.values()) / total_s) if total_s > 0 else 0.0


def build_summary(
    *,
    losses_hex: Sequence[str],
    weights_sha256: str,
    samples_sha256: str,
    goodput: float,
    exact: bool,
    generations: Iterable[Mapping[str, Any]],
    recoveries: Iterable[Mapping[str, Any]],
) -> dict[str, Any]:
    """The content of summary.json, with exactly the promised keys in the promised order.

    Raises: KeyError when a generation or recovery lacks a key. Keys that nobody was promised are left out.
    """
    return {
        "steps": len(losses_hex),
        "losses": list(losses_hex),
        "weights_sha256": weights_sha256,
        "samples_sha256": samples_sha256,
        "goodput": goodput,
        "exact": exact,
        "generations": [{key: one[key] for key in GENERATION_KEYS} for one in generations],
        "recoveries": [{key: one[key] for key in RECOVERY_KEYS} for one in recoveries],
    }


def write_summary(directory: str | os.PathLike[str], summary: Mapping[str, Any]) -> Path:
    """DIR/summary.json, whole or not at all, on disk when this returns."""
    assert tuple(summary) == SUMMARY_KEYS, tuple(summary)
    path = Path(directory) / SUMMARY_NAME
    write_json(path, summary, durable=True)
    return path


def read_status(folder: Path) -> dict[str, Any] | None:
    """What a run's status.json says; None where there is none.

    One that is no JSON is taken for none: it is written without waiting for the disk, so that a host which loses power
    may leave it empty, and nothing that a run needs is in it alone.
    """
    path = folder / STATUS_NAME
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        log.warning("%s cannot be read and is taken for missing: %s", path, error)
        return None
    return found if isinstance(found, dict) else None


def write_json(path: str | os.PathLike[str], content: Mapping[str, Any], *, durable: bool = False) -> None:
    """Replace a JSON file in one rename, so that a reader finds the old content or the new one."""
    path = Path(path)
    # Own name for each writer: an old coordinator and its successor may both be at it.
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}")
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(partial, path)
    if durable:
        sync_directory(path.parent)
