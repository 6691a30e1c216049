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

import pytest

from elastic_ring.attention.patterns.parse import read_pattern

ROOT = Path(__file__).parents[3]
NUM_TRIALS = 7
SMALL = ["--short-steps=1", "--long-steps=2", "--seq-len=128", "--cost-len=512", "--cpus-per-trial=0.5"]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}


def command(*more: str) -> list[str]:
    """Run in a folder of the test's own: `--out` is relative, as in the docs, and trials have yet other folders."""
    return [
        sys.executable,
        str(ROOT / "tune" / "search_patterns.py"),
        "--out",
        "runs/search",
        f"--trials={NUM_TRIALS}",
        *SMALL,
        *more,
    ]


def lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "trials.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def trained(folder: Path) -> list[str]:
    """Patterns that reached the last fidelity."""
    return [line["name"] for line in lines(folder) if line["fidelity"] == 3]


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What both searches start from, measured once and without Ray."""
    path = tmp_path_factory.mktemp("baseline") / "baseline.json"
    code = (
        "import sys; from pathlib import Path; from elastic_ring.tuning.climb import Climb;"
        "from elastic_ring.tuning.fidelity import baseline;"
        "baseline(Path(sys.argv[1]), Climb(1, 2, 128, 512))"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, env=ENVIRONMENT, check=True, timeout=280)
    return path


def folder_with(baseline: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "search"
    folder.mkdir(parents=True)
    (folder / "baseline.json").write_bytes(baseline.read_bytes())
    return folder


@pytest.mark.soak
def test_a_killed_search_goes_on_without_repeating_what_was_measured(baseline: Path, tmp_path: Path) -> None:
    folder = folder_with(baseline, tmp_path)
    options: Any = {"cwd": tmp_path, "env": ENVIRONMENT, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command(), **options) as driver:
        deadline = time.monotonic() + 200
        while len(trained(folder)) < 3:
            assert driver.poll() is None, "the search ended before it could be killed"
            assert time.monotonic() < deadline, "the search is stuck"
            time.sleep(0.1)
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    assert not (folder / "front.md").exists()
    pids = {line["pid"] for line in lines(folder)}
    other: Any = {"cwd": tmp_path, "env": ENVIRONMENT, "capture_output": True, "text": True, "timeout": 250}
    refused = subprocess.run(command("--seed=5"), **other)
    assert refused.returncode == 2
    assert "was begun with --seed 0, not 5" in refused.stderr
    again = subprocess.run(command(), **other)
    assert again.returncode == 0, again.stderr[-3000:]
    assert {line["pid"] for line in lines(folder)} > pids, "the second run measured nothing: the first was killed late"
    measured = Counter((line["name"], line["fidelity"]) for line in lines(folder))
    assert set(measured.values()) == {1}, measured
    front = (folder / "front.md").read_text()
    assert f"{NUM_TRIALS} trials" in front
    assert "Rank correlation" in front
    assert (folder / "front.png").stat().st_size > 1000
    pattern = read_pattern(str(folder / "pattern-1.json"))
    pattern.check(2, 4, 2)
    assert set(json.loads((folder / "pattern-1.json").read_text())["measured"]) == {"density", "gap", "step_s", "bytes"}


@pytest.mark.soak
def test_a_search_whose_trials_all_fail_says_so(baseline: Path, tmp_path: Path) -> None:
    folder = folder_with(baseline, tmp_path)
    (folder / "trials.jsonl").mkdir()  # where no line can be written
    done = subprocess.run(
        command("--trials=2"), cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 1, done.stderr[-3000:]
    assert "none of 2 trials reached the last fidelity" in done.stderr
    assert "a trial failed" in done.stderr
    assert not (folder / "front.md").exists()
