"""The recorded runs: their settings, and their files as `tests/ray/record_runs.py` has left them in `recorded/`.

No Ray here.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from elastic_ring.config import CheckpointConfig, RunConfig, ScalingConfig
from elastic_ring.control.decisions.memory_ladder import reliefs_on
from elastic_ring.control.options import ControlOptions
from elastic_ring.monitor.json_files import json_bytes, parse_json
from elastic_ring.monitor.metrics import JOURNAL_NAME, METRICS_NAME, STATUS_NAME, SUMMARY_NAME
from tests.journals import journal_bytes, parse

RECORDED = Path(__file__).with_name("recorded")
NAMES = (JOURNAL_NAME, METRICS_NAME, SUMMARY_NAME, STATUS_NAME)
STEPS = 12
STORAGE = "/runs"
"""Stands in the records for the folder of the runs."""
ADDRESS = "10.0.0.1"
OF_A_MACHINE = re.compile(
    r"/(?:home|root|tmp|usr|var|work|opt|dev|Users)/|\b(?!127\.|0\.|10\.0\.0\.1\b)\d{1,3}(?:\.\d{1,3}){3}\b"
)
"""Folders, users and addresses of a machine."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run of two rings of two. `slow_s`: the pause before each pass."""

    faults: str = ""
    spares: int = 1
    slow_s: float = 0.0
    val_every_steps: int = 0
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)


RUNS = {
    "plain": Settings(val_every_steps=4, checkpoints=CheckpointConfig(every_steps=5)),
    "kill": Settings(faults="kill@step=4,phase=backward,rank=3"),
    "growth": Settings(faults="kill@step=1,phase=backward,rank=3", spares=0),
    "drain": Settings(faults="drain@step=6,rank=1"),
    "lost-coordinator": Settings(faults="kill-coordinator@step=2", spares=0, slow_s=0.4),
}


def _in_todays_format(name: str, content: bytes) -> bytes:
    if name.endswith(".json"):
        return json_bytes(json.loads(content) | ({"updated_at": 0.0} if name == STATUS_NAME else {}))
    lines = list(map(json.loads, content.splitlines()))
    for build in (command for line in lines for command in line.get("commands", ()) if command["type"] == "Build"):
        build["undone"] = 0
    return journal_bytes({key: value for key, value in line.items() if key != "crc"} for line in lines)


@dataclass(frozen=True)
class RecordedRun:
    name: str
    files: Mapping[str, bytes]
    """By name, as they were in the run's folder."""

    @classmethod
    def read(cls, name: str) -> RecordedRun:
        """The records of format 1 in today's."""
        files = {file: gzip.decompress((RECORDED / name / f"{file}.gz").read_bytes()) for file in NAMES}
        return cls(name, {file: _in_todays_format(file, content) for file, content in files.items()})

    @property
    def journal(self) -> list[dict[str, Any]]:
        return list(parse(self.files[JOURNAL_NAME], self.name))

    @property
    def summary(self) -> dict[str, Any]:
        return parse_json(self.files[SUMMARY_NAME], SUMMARY_NAME)

    @property
    def status(self) -> dict[str, Any]:
        return parse_json(self.files[STATUS_NAME], STATUS_NAME)

    @property
    def options(self) -> ControlOptions:
        settings = RUNS[self.name]
        run = RunConfig(
            self.name,
            run_dir=f"{STORAGE}/{self.name}",
            faults=settings.faults,  # type: ignore[arg-type]
            progress=False,
            grow_cost_s=0.0,
            checkpoint_config=settings.checkpoints,
        )
        scaling = ScalingConfig(dp=2, cp=2, spares=settings.spares)
        return ControlOptions(run, scaling, STEPS, reliefs_on("cpu", 1), waits_for_spares=bool(run.faults))

    def run_config(self, folder: Path) -> RunConfig:
        """The run's, with its files in a folder."""
        return replace(self.options.run, run_dir=str(folder))
