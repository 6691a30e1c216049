"""Ctrl-C in a terminal, once and twice, at each stage of `train`, `fit()` and `tune`: nothing is left, Python lives."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from ray._common.utils import get_ray_address_file

from elastic_ring.cli.endings import ENDINGS, STOPPED
from tests.ray.conftest import ROOT, num_steps
from tests.terminal import Terminal

SMALL = "--model.num-layers 1 --model.width 32 --model.ffn-width 64 --context 64 --global-batch 1"
RUN = "--faults none --dp 1 --cp 1 --spares 0 --run-dir run"
STEPS = 40
SPACE = 'pattern = ["window:{w}"]\nw = [16]\n'
KERNEL = """
from elastic_ring.cli.train import build, parse
import sys

trainer = build(parse(sys.argv[1:]))
print("begins", flush=True)
line = "again"
while line:  # as a notebook's kernel waits for its next cell
    try:
        if line == "again":
            line = "waits"
            print(trainer.fit().summary["steps"], "steps", flush=True)
        line = input("alive")
    except KeyboardInterrupt as stopped:
        print(f"raised: {stopped}", flush=True)
"""
WORDS = {
    "train": ("-m", *f"elastic_ring train {SMALL} {RUN}".split()),
    "fit": ("-c", KERNEL, *f"{SMALL} {RUN}".split()),
    "tune": ("-m", *f"elastic_ring tune --out search --space space.toml --trials 1 --dp 1 --cp 1 {SMALL}".split()),
}
STAGES = ("imports", "before Ray", "Ray starts", "begins", "trains", "ends")
GAPS = (None, 0.1, 0.5, 2.0)
"""Seconds between the first and the second; None: only one."""
CASES = [
    (command, stage, gap)
    for command in WORDS
    for stage in STAGES
    for gap in GAPS
    if (command, stage) != ("fit", "imports")
]
CHOSEN = {
    ("train", "imports", None),
    ("train", "before Ray", 0.1),
    ("train", "Ray starts", 0.5),
    ("train", "begins", None),
    ("train", "trains", 0.1),
    ("train", "ends", 0.1),
    ("fit", "before Ray", None),
    ("fit", "Ray starts", 0.1),
    ("fit", "begins", 0.5),
    ("fit", "trains", None),
    ("tune", "before Ray", 0.5),
    ("tune", "Ray starts", None),
    ("tune", "begins", 0.1),
    ("tune", "trains", 0.5),
}
"""Each command, stage and gap; the rest is soak."""


def reached(terminal: Terminal, command: str, stage: str, folder: Path) -> bool:
    search = folder / "search" / "search" / "patterns"
    match stage:
        case "imports":
            return terminal.has_loaded("pydantic_core")
        case "before Ray":
            return terminal.has_loaded("_raylet") and (command != "fit" or "begins" in terminal.text)
        case "Ray starts":
            return "gcs_server" in terminal.children()
        case "begins":
            return search.exists() if command == "tune" else (folder / "run" / "journal.jsonl").exists()
        case "trains":
            return "dense, 1 of" in terminal.text if command == "tune" else num_steps(folder / "run") >= 2
        case _:
            return (search / "../../front.json").exists() if command == "tune" else num_steps(folder / "run") == STEPS


@pytest.mark.parametrize(
    ("command", "stage", "gap"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case in CHOSEN else pytest.mark.soak, id="-".join(map(str, case)))
        for case in CASES
    ],
)
def test_ctrl_c_leaves_nothing_and_no_traceback_and_python_lives(tmp_path, command, stage, gap):
    (tmp_path / "space.toml").write_text(SPACE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"}
    address = Path(get_ray_address_file(None))
    before = address.read_text() if address.exists() else None
    words = [sys.executable, *WORDS[command], "--steps", str(STEPS)]
    with Terminal(words, tmp_path, environment) as terminal:
        terminal.wait_until(lambda: reached(terminal, command, stage, tmp_path))
        terminal.press()
        if gap is not None:
            time.sleep(gap)
            terminal.press()
        if command == "fit":
            terminal.wait_until(lambda: terminal.text.rstrip().endswith("alive"))
            if stage == "begins":  # the next cell trains
                time.sleep(1.0)  # an interrupt on its way would take the line with it
                terminal.press(b"again\n")
                terminal.wait_until(lambda: f"{STEPS} steps" in terminal.text)
            terminal.leave()
        status = terminal.process.wait(90.0)
        assert terminal.left(within_s=10.0) == []
        assert terminal.modes_are_kept()
        text = terminal.text
    assert "Traceback" not in text, text
    assert "Exception ignored" not in text, text
    assert (address.read_text() if address.exists() else None) == before
    lines = [line for line in text.replace("^C", "").splitlines() if line.strip()]
    if command == "fit":
        assert status == 0, text
        assert "raised: " in text or stage == "ends", text
    elif stage != "imports" and status != 0:
        begins = tuple(f"elastic-ring {command}: {ending.begins.split(' N;')[0]}" for ending in ENDINGS[5:])
        assert lines[-1].startswith(begins), text
    # Once a command has said its last line, the signal itself may end it, which a shell shows as the same.
    assert command == "fit" or status in (STOPPED, -signal.SIGINT) or (stage == "ends" and status == 0), text
