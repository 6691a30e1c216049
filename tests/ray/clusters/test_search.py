"""From a dense run to a sparse one: `train`, `tune --from`, `train --pattern FOUND --from`, through two kills.

A killed trial goes on from its checkpoint, a killed search with the same command, and what is trained with the pattern
that was found has the loss that was predicted.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from ray import tune

from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.cli.settings import parse
from elastic_ring.cli.train import build
from elastic_ring.monitor.metrics import read_metrics
from elastic_ring.tuning.report import NUM_REPORTS
from elastic_ring.tuning.trial import pattern_trainable
from tests.ray.conftest import ROOT, ran
from tests.ray.fork_server import ForkServer

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"}
PAGE = (ROOT / "docs" / "patterns.md").read_text(encoding="utf-8")
TRAIN, SEARCH = re.findall("^elastic-ring (.*)$", PAGE.split("## Find one for your model")[1], re.MULTILINE)
SMALL = "--model.num-layers 2 --model.width 32 --model.ffn-width 64 --global-batch 2"
SPACE = 'pattern = ["window:{w}", "window:{w};dense@1"]\nw = [64, 128]\nlayers = ["{rule}"]\n'
TUNE = f"{SEARCH} --space space.toml --trials 4 --concurrent 2 {SMALL}"


def command(server: ForkServer, text: str, folder: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    words = server.python("-m", "elastic_ring", *shlex.split(text))
    return ran(*words, code=code, cwd=folder, env=ENVIRONMENT, timeout_s=280.0)


def results(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """By trial what it has reported, as Ray Tune writes it."""
    found = {}
    for path in (folder / "search" / "search" / "patterns").glob("*/result.json"):
        lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
        found[path.parent.name] = [json.loads(line) for line in lines]
    return found


def wait_for(what: Callable[[], Any], driver: subprocess.Popen[bytes]) -> Any:
    deadline = time.monotonic() + 200
    while not (found := what()):
        assert driver.poll() is None, "the search ended before it could be killed"
        assert time.monotonic() < deadline, "the search is stuck"
        time.sleep(0.02)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dense_run_becomes_a_sparse_one_through_a_killed_trial_and_a_killed_search(
    fork_server, tmp_path, monkeypatch
):
    (tmp_path / "space.toml").write_text(SPACE)
    command(fork_server, f"{TRAIN} {SMALL}", tmp_path)
    words = [sys.executable, "-m", "elastic_ring", *TUNE.split()]
    streams: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(words, cwd=tmp_path, env=ENVIRONMENT, **streams) as driver:

        def half_way() -> list[tuple[str, int]]:
            ended = {name for name, lines in results(tmp_path).items() if lines and lines[-1]["done"]}
            running = {name: lines for name, lines in results(tmp_path).items() if name not in ended}
            return [(name, lines[-1]["pid"]) for name, lines in running.items() if len(lines) == 2 and ended]

        killed, pid = wait_for(half_way, driver)[0]
        os.kill(pid, signal.SIGKILL)
        # Not the last line's: Tune copies the files over and over, and one that is being written is empty.
        wait_for(lambda: any(line["done"] for line in results(tmp_path)[killed]), driver)
        wait_for(lambda: any(lines and not lines[-1]["done"] for lines in results(tmp_path).values()), driver)
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    before = {name: lines for name, lines in results(tmp_path).items() if lines and lines[-1]["done"]}
    curves = [line["losses"] for line in results(tmp_path)[killed]]
    assert all(after[: len(one)] == one for one, after in pairwise(curves)), "it did not go on from its checkpoint"
    assert len({line["pid"] for line in results(tmp_path)[killed]}) == 2
    assert [line["training_iteration"] for line in results(tmp_path)[killed]][-1] == NUM_REPORTS

    refused = command(fork_server, f"{TUNE} --seed 5", tmp_path, code=2)
    assert "was begun with arguments" in refused.stderr
    again = command(fork_server, TUNE, tmp_path)
    assert {name: lines for name, lines in results(tmp_path).items() if name in before} == before
    assert "6 of 6 trials ended" in again.stderr
    assert "min left" in again.stderr
    front = json.loads((tmp_path / "search" / "front.json").read_text())
    assert all(parse_pattern(one["pattern"]) for one in front["front"])
    assert (tmp_path / "search" / "front.png").stat().st_size > 1000
    assert "| `--pattern` |" in again.stdout

    following = shlex.split(again.stdout.splitlines()[-1])
    assert following[:2] == ["elastic-ring", "train"]
    found = following[following.index("--pattern") + 1]
    sparse = command(fork_server, shlex.join(following[1:]), tmp_path)
    assert re.search(
        r"search: step .* seen .* loss predicted .* within the spread .*; the search had mesh dp=1 x cp=1, not dp=1 x "
        r"cp=2$",
        sparse.stdout,
        re.MULTILINE,
    )
    predicted = next(lines[-1]["loss"] for lines in results(tmp_path).values() if lines[-1]["pattern"] == found)
    told = [line for line in read_metrics(tmp_path / "runs" / "search") if line.get("val_loss") is not None]
    assert told[-1]["val_loss"] == pytest.approx(predicted, abs=1e-4), "the same steps, on a ring of two"
    assert abs(told[-1]["val_loss"] - next(one["loss"] for one in front["all"] if one["pattern"] == found)) <= max(
        front["spread"], 1e-4
    )
    monkeypatch.chdir(tmp_path)
    trainer = build(parse(f"{SMALL} {SEARCH.partition('--out search')[2]}".split()))
    grid = tune.Tuner.restore(
        str(tmp_path / "search" / "search" / "patterns"), pattern_trainable(trainer)
    ).get_results()
    assert grid.num_errors == 0
    assert grid.get_best_result("loss", "min").metrics["loss"] == min(
        one[-1]["loss"] for one in results(tmp_path).values()
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_in_a_trial_on_a_mesh_tells_no_front_and_the_same_command_goes_on_with_that_trial(fork_server, tmp_path):
    (tmp_path / "space.toml").write_text('pattern = ["window:64"]\nlayers = ["{rule}"]\n')
    on_mesh = f"{SEARCH.partition(' --from ')[0]} --on-mesh --space space.toml {SMALL}".replace(
        "--steps 48", "--steps 24"
    )
    words = [sys.executable, "-m", "elastic_ring", *on_mesh.split()]
    log = tmp_path / "told.log"
    with log.open("wb") as file:
        streams: Any = {"stdout": file, "stderr": file, "start_new_session": True}
        driver = subprocess.Popen(words, cwd=tmp_path, env=ENVIRONMENT, **streams)
    try:
        wait_for(lambda: "dense, 2 of 4" in log.read_text(), driver)
        os.killpg(driver.pid, signal.SIGINT)  # as a terminal does
        assert driver.wait(timeout=120) == 130
    finally:
        driver.kill()
    told = log.read_text()
    assert told.splitlines()[-1] == "elastic-ring tune: stopped; the same command goes on with this search"
    assert not (tmp_path / "search" / "front.md").exists()
    (run,) = (tmp_path / "search" / "search" / "runs").iterdir()
    done = max(one["step"] for one in read_metrics(run))
    again = command(fork_server, on_mesh, tmp_path)
    assert (run / "attempt-001").exists()
    summary = json.loads((run / "summary.json").read_text())
    assert 0 < summary["resumed_from"][-1]["step"] <= done + 1
    assert summary["stopped"] == ""
    assert {len(lines[-1]["losses"]) for lines in results(tmp_path).values()} == {NUM_REPORTS}
    assert "3 of 3 trials ended" in again.stderr
