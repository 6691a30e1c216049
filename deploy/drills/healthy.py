"""The drill `healthy`: nothing is planted, and nothing may be found, with all rules of rules.yml and their own times.

A run of two rings and a spare trains for as long as is asked on a Ray of its own. A real Prometheus judges all alerts
as it would in production, and the run's detectors (loss spikes, stragglers, wrong results) only tell what they find.
Any alert that fired, any finding and any recovery is a false alarm, unless the machine had other work to do.
"""

from __future__ import annotations

import argparse
import logging
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from deploy.drills.local_cluster import LocalCluster, free_ports
from deploy.drills.planted import Scene
from deploy.drills.processes import start_training
from deploy.drills.prometheus import Prometheus
from elastic_ring.config import RunConfig
from elastic_ring.monitor.journal import read
from elastic_ring.monitor.metrics import JOURNAL_NAME

log = logging.getLogger(__name__)

TRAIN = (
    "--preset",
    "laptop",
    "--dp",
    "2",
    "--cp",
    "1",
    "--spares",
    "1",
    "--context",
    "512",
    "--global-batch",
    "4",
    "--steps",
    "10000000",
    "--val-every",
    "1000",
    "--checkpoint-every-steps",
    "1000",
    "--cpus-per-worker",
    "1",
    "--optim.peak-lr",
    "0.001",
    "--optim.min-lr",
    "0.0001",
    "--optim.warmup-steps",
    "200",
    "--optim.total-steps",
    "50000",
    "--run.corruption",
    "log",
    "--run.corruption-every-steps",
    "50",
    "--run.straggler",
    "log",
    "--run.loss-spike",
    "log",
)
FINDINGS = ("spike", "straggler", "wrong", "tight", "recovery")
"""Notes in the journal that a healthy run has none of."""
LOOK_S = 5.0


def healthy(options: argparse.Namespace) -> int:
    """Exit status 0 when nothing was found, 1 for any alarm. Raises ValueError for what is missing."""
    rules = Path(options.rules)
    if not rules.is_file():
        raise ValueError(f"--rules {rules}: there is no such file; give deploy/monitoring/rules.yml of the project")
    if shutil.which("prometheus") is None:
        raise ValueError("the program prometheus is not installed (Debian: apt install prometheus)")
    if not options.minutes > 0:
        raise ValueError(f"--minutes {options.minutes:g}: must be above 0")
    with tempfile.TemporaryDirectory(prefix="er-", ignore_cleanup_errors=True) as folder, ExitStack() as stack:
        return _watch(rules.read_text(), Path(folder), options, stack)


def _watch(rules: str, folder: Path, options: argparse.Namespace, stack: ExitStack) -> int:
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what the drill has started ends with it
    stack.callback(signal.signal, signal.SIGTERM, before)
    token = secrets.token_hex(8)
    run = RunConfig(name=f"healthy-{secrets.token_hex(2)}", storage_path=options.storage_path)
    cluster = stack.enter_context(LocalCluster(folder / "ray", (4,), token))
    (port,) = free_ports(1)
    prometheus = stack.enter_context(Prometheus(folder, port, cluster.metrics, rules, token, every="15s"))
    arguments = [*TRAIN, *options.train, "--run-name", run.name, "--storage-path", options.storage_path]
    training = start_training(arguments, folder / "train.log", token, cluster.variables)
    scene = Scene(run, cluster, training, token)
    stack.callback(training.wait)  # left in reverse: everything is killed first
    stack.callback(cluster.__exit__)
    try:
        scene.until("the first steps", lambda: scene.num_steps() >= 2)
        scene.until("that Prometheus sees the run", lambda: prometheus.sees(run.name))
    except SystemExit as error:
        said = (folder / "train.log").read_text(errors="replace")[-2000:]
        raise SystemExit(f"{error}\n{said}") from None
    end, shown_at = time.monotonic() + 60 * options.minutes, time.monotonic()
    while time.monotonic() < end:
        if training.poll() is not None:
            break
        if time.monotonic() - shown_at > 300:
            shown_at = time.monotonic()
            log.info("step %d, %.0f minutes to go", scene.num_steps(), (end - shown_at) / 60)
        time.sleep(LOOK_S)
    found = Findings.of(prometheus, run, options.minutes)
    ended = training.poll() is not None
    print(found.told(scene.num_steps(), options.minutes, ended))
    return 1 if ended or found.is_alarm else 0


class Findings:
    """What was found in a run in which nothing was planted."""

    def __init__(self, num_rules: int, fired: list[str], notes: Counter[str]) -> None:
        self.num_rules, self.fired, self.notes = num_rules, fired, notes

    @classmethod
    def of(cls, prometheus: Prometheus, run: RunConfig, minutes: float) -> Findings:
        window_s = int(60 * minutes) + 120
        fired = prometheus.query(f'max_over_time(ALERTS{{alertstate="firing"}}[{window_s}s])')
        return cls(prometheus.num_rules(), [shown(one["metric"]) for one in fired], notes_of(run.folder / JOURNAL_NAME))

    @property
    def is_alarm(self) -> bool:
        """A Prometheus that judged no rule has shown nothing."""
        return bool(self.fired or self.notes or not self.num_rules)

    def told(self, num_steps: int, minutes: float, ended: bool) -> str:
        lines = [f"{num_steps} steps in {minutes:g} minutes, {self.num_rules} rules judged"]
        lines += ["the run ended by itself"] if ended else []
        lines += [f"fired: {one}" for one in self.fired]
        lines += [f"found: {number} x {note}" for note, number in sorted(self.notes.items())]
        return "\n".join([*lines, "FALSE ALARM" if self.is_alarm else "silent"])


def notes_of(journal: Path) -> Counter[str]:
    """How often the journal has each of FINDINGS."""
    notes = [str(line["note"]) for line in read(journal) if "note" in line]
    return Counter(note for note in notes if note in FINDINGS)


def shown(labels: dict[str, Any]) -> str:
    rest = {name: value for name, value in labels.items() if name not in ("alertname", "alertstate", "__name__")}
    return f"{labels['alertname']} {rest}"
