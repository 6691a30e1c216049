"""The search for patterns survives its driver: what was finished before a SIGKILL does not run again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from elastic_ring.attention.spec import read_pattern

ROOT = Path(__file__).parents[2]
NUM_TRIALS = 7


def command(folder: Path) -> list[str]:
    small = ["--short-steps=1", "--long-steps=2", "--seq-len=128", "--cost-len=512", "--cpus-per-trial=0.5"]
    return [sys.executable, "tune/search_patterns.py", "--out", str(folder), "--trials", str(NUM_TRIALS), *small]


def lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "trials.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def trained(folder: Path) -> list[str]:
    """Patterns that reached the last rung."""
    return [line["name"] for line in lines(folder) if line["rung"] == 3]


def test_a_killed_search_goes_on_without_repeating_what_was_measured(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    folder = tmp_path / "search"
    options: Any = {"cwd": ROOT, "env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command(folder), **options) as driver:
        deadline = time.monotonic() + 200
        while len(trained(folder)) < 3:
            assert driver.poll() is None, "the search ended before it could be killed"
            assert time.monotonic() < deadline, "the search is stuck"
            time.sleep(0.1)
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    assert not (folder / "front.md").exists()
    pids = {line["pid"] for line in lines(folder)}
    again = subprocess.run(command(folder), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
    assert again.returncode == 0, again.stderr[-3000:]
    assert {line["pid"] for line in lines(folder)} > pids, "the second run measured nothing: the first was killed late"
    measured = Counter((line["name"], line["rung"]) for line in lines(folder))
    assert set(measured.values()) == {1}, measured
    front = (folder / "front.md").read_text()
    assert f"{NUM_TRIALS} trials" in front
    assert "Rank correlation" in front
    assert (folder / "front.png").stat().st_size > 1000
    pattern = read_pattern(str(folder / "pattern-1.json"))
    pattern.check(2, 4, 2)
    assert set(json.loads((folder / "pattern-1.json").read_text())["measured"]) == {"density", "gap", "step_s", "bytes"}
