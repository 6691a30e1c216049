"""The drill `power-cut`: kill every process of a run, Ray's too, submit it again, compare with an undisturbed run."""

from __future__ import annotations

import argparse
import logging
import math
import random
import secrets
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.drills.processes import LOOK_S, kill_everything, start_training
from elastic_ring.config import RunConfig
from elastic_ring.files import plain_json
from elastic_ring.monitor.journal import read
from elastic_ring.monitor.metrics import JOURNAL_NAME, METRICS_NAME, SUMMARY_NAME, read_metrics
from elastic_ring.runtime import run_storage
from elastic_ring.state.checkpoints.checkpoint import committed
from elastic_ring.state.storage.folder import Storage

log = logging.getLogger(__name__)

RUN_S = 900.0
MOMENTS = ("commit", "upload")
"""Of a checkpoint, for --in-save: between its files and its manifest, in the middle of a file."""


@dataclass(frozen=True)
class Cut:
    """One power cut: how many processes it killed, after how many recorded steps, and how soon these had gone on."""

    num_killed: int
    after_steps: int
    to_next_step_s: float


class Watched:
    """A run as an onlooker sees it, in its folder or in its object store."""

    def __init__(self, name: str, storage_path: str) -> None:
        self.run = RunConfig(name=name, storage_path=storage_path)
        self.folder = Path(tempfile.mkdtemp()) if self.run.is_remote else self.run.folder
        self.storage = Storage(self.run.storage_uri, timeout_s=self.run.timeouts.storage_s)
        self.log_path = Path(tempfile.mkdtemp(), f"{name}.log")

    def look(self) -> Path:
        """The folder with the run's records as they are now."""
        run_storage.fetch(self.run, self.folder)
        return self.folder

    def num_lines(self) -> int:
        path = self.look() / METRICS_NAME
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def num_steps(self) -> int:
        return len(read_metrics(self.look()))

    def is_slow(self, since_s: float) -> bool:
        """Whether the planned fault of a submission at the Unix time `since_s` has fired."""
        path = self.look() / JOURNAL_NAME
        notes = [line for line in read(path) if line.get("note") == "fault"] if path.exists() else []
        return any(note["now"] > since_s for note in notes)

    def checkpoints(self) -> list[int]:
        """The steps that have a checkpoint which counts."""
        found = committed(self.storage.open(write=False)) if self.run.is_remote or self.folder.exists() else []
        return sorted(int(folder.split("/")[1].removeprefix("step-")) for folder in found)

    def next_step_s(self, since_s: float) -> float:
        """From a submission at the Unix time `since_s` to its first committed step, in seconds."""
        lines = [plain_json(line) for line in (self.look() / METRICS_NAME).read_text().splitlines() if line[-1:] == "}"]
        return min([one["unix_s"] - since_s for one in lines if one.get("unix_s", 0.0) > since_s], default=math.nan)


def power_cut(options: argparse.Namespace) -> int:
    """An undisturbed run, then one that is cut; both must end with the same losses, samples and weights."""
    name = f"power-cut-{secrets.token_hex(3)}"
    calm, cut_run = (Watched(each, options.storage_path) for each in (f"{name}-undisturbed", name))
    expected = _wait(_start(calm, options, every=0), calm)
    step_s = sorted(line["step_s"] for line in read_metrics(calm.look()))[options.steps // 2]
    moments, cuts = random.Random(options.seed), []
    for number in range(1, options.cuts + 1):
        delay_s = moments.uniform(0.0, 1.3 * options.every * step_s)
        cuts.append(_cut(cut_run, options, delay_s, MOMENTS[number % len(MOMENTS)] if options.in_save else ""))
        log.info("cut %d: %d processes killed after step %d", number, cuts[-1].num_killed, cuts[-1].after_steps - 1)
    last_s = time.time()
    summary = _wait(_start(cut_run, options, every=options.every), cut_run)
    return _told(cuts, cut_run.next_step_s(last_s), cut_run.checkpoints(), summary, expected)


def _cut(watched: Watched, options: argparse.Namespace, delay_s: float, moment: str) -> Cut:
    """Run until it has trained on and has a checkpoint, for `delay_s` more, then kill everything at once.

    With a `moment`, upload or commit, in the middle of a file of the checkpoint after that, or between its files and
    its manifest, each of which takes longer this time.
    """
    before, begun_s, token = watched.num_lines(), time.time(), secrets.token_hex(8)
    step = max(watched.checkpoints(), default=options.every) + options.every if moment else 0
    faults = f"slow@step={step},phase={moment}" if moment else "none"
    process = _start(watched, options, every=options.every, token=token, faults=faults)
    deadline = time.monotonic() + RUN_S
    while not (watched.checkpoints() and (watched.is_slow(begun_s) if moment else watched.num_lines() > before)):
        if process.poll() is not None or time.monotonic() > deadline:
            kill_everything(token)
            raise SystemExit(f"drill: the run ended ({process.returncode}) before it could be cut; give more --steps")
        time.sleep(LOOK_S)
    if not moment:
        time.sleep(delay_s)
    elif step in watched.checkpoints():
        raise SystemExit(f"drill: the checkpoint of step {step} was whole before it could be cut")
    if process.poll() is not None:
        raise SystemExit("drill: the run ended before it could be cut; give more --steps")
    num_killed = kill_everything(token)
    process.wait()
    if watched.run.is_remote:  # as on another machine: nothing is left but what the store has
        shutil.rmtree(watched.run.folder.parent, ignore_errors=True)
    return Cut(num_killed, watched.num_steps(), watched.next_step_s(begun_s))


def _start(
    watched: Watched, options: argparse.Namespace, *, every: int, token: str = "", faults: str = "none"
) -> subprocess.Popen[bytes]:
    arguments = [
        *options.train,
        "--steps",
        str(options.steps),
        "--run-name",
        watched.run.name,
        "--storage-path",
        options.storage_path,
        "--checkpoint-every-steps",
        str(every),
        "--faults",
        faults,
    ]
    # A cluster that others use is not for cutting.
    return start_training(arguments, watched.log_path, token, {"RAY_ADDRESS": "local"})


def _wait(process: subprocess.Popen[bytes], watched: Watched) -> dict[str, Any]:
    status = process.wait(RUN_S)
    if status:
        told = watched.log_path.read_text(errors="replace")[-2000:]
        raise SystemExit(f"drill: run {watched.run.name} ended with exit status {status}; it said:\n{told}")
    summary: dict[str, Any] = plain_json((watched.look() / SUMMARY_NAME).read_text())
    return summary


def _told(cuts: list[Cut], last_s: float, left: list[int], summary: dict[str, Any], expected: dict[str, Any]) -> int:
    equal = {key: summary[key] == expected[key] for key in ("losses", "samples_sha256", "weights_sha256")}
    # A submission that is cut before it is past the steps on record has committed none of its own.
    seconds = [s for s in (*(cut.to_next_step_s for cut in cuts[1:]), last_s) if math.isfinite(s)]
    print(
        f"{len(cuts)} power cut(s), {sum(cut.num_killed for cut in cuts)} processes killed\n"
        f"resumed at steps {', '.join(str(one['step']) for one in summary['resumed_from'])}\n"
        f"from a new submission to its first new step: {', '.join(f'{s:.1f}' for s in seconds)} s\n"
        f"checkpoints left: {', '.join(map(str, left))}\n"
        f"as in the undisturbed run: {', '.join(f'{key} {same}' for key, same in equal.items())}"
    )
    return 0 if all(equal.values()) else 1
