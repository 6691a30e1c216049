"""A run in words and in a picture: the sentence, the progress line, the status of any folder, the PNG."""

from __future__ import annotations

import contextlib
import fcntl
import io
import math
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from elastic_ring.cli import status
from elastic_ring.config import RunConfig
from elastic_ring.control.facts import GenerationBegan
from elastic_ring.files import read_small
from elastic_ring.mesh import Mesh
from elastic_ring.monitor import json_files
from elastic_ring.monitor.goodput import TIME_PARTS
from elastic_ring.monitor.journal import Journal
from elastic_ring.monitor.metrics import Recovery, StepMetrics, Summary, write_json
from elastic_ring.monitor.metrics_log import MetricsLog
from elastic_ring.monitor.plot import draw_run, short_cause
from elastic_ring.monitor.progress import ProgressLine
from elastic_ring.monitor.report import (
    TIME_NAMES,
    duration,
    goodput_line,
    human_rate,
    left_s,
    recovery_line,
    render_status,
    seconds,
)
from elastic_ring.runtime import run_storage
from tests.object_store.store import ObjectStore
from tests.signals import heed_interrupts

STATUS_JOB = Path(__file__).resolve().parents[3] / "jobs" / "status.py"
RECOVERY: dict[str, Any] = {
    "step": 21,
    "faults": [],
    "cause": "rank 3 died in backward",
    "action": "spare took its place",
    "detect_s": 0.02,
    "close_s": 0.11,
    "heal_s": 0.05,
    "rerun_s": 0.2,
    "total_s": 0.4,
    "steps_undone": 0,
    "steps_rerun": 1,
    "source": "replica",
    "survivor_pids_kept": True,
    "exact": True,
}
SENTENCE = (
    "rank 3 died in backward of step 21; spare took its place in 0.4 s: "
    "detect 0.02, close 0.11, heal 0.05, rerun 0.2; no step lost"
)


def metrics(step: int, **changes: Any) -> StepMetrics:
    values: dict[str, Any] = {
        "step": step,
        "loss": 5.0 - step / 10,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "num_tokens": 8192,
        "tokens_per_s": 9120.0,
        "step_s": 0.9,
        "skipped": False,
        "generation": 1 + step // 21,
        "mesh": Mesh(2, 2),
        "num_members": 4,
        "expert_load_max": 1.25,
    }
    return StepMetrics(**{**values, **changes})


def live_status(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "run": "laptop",
        "phase": "running",
        "term": 2,
        "generation": 3,
        "mesh": {"dp": 2, "cp": 2},
        "step": 24,
        "total_steps": 40,
        "spares": ["w-7"],
        "recoveries": [RECOVERY],
        "updated_unix_s": 5000.0,
        "ended": False,
        "error": "",
        "members": [
            {"global_rank": rank, "worker": f"w-{rank}", "node": "node-a", "pid": 100 + rank} for rank in (2, 0)
        ],
    }
    return {**values, **changes}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a live run, as its coordinator keeps it."""
    with MetricsLog(tmp_path) as log:
        for step in range(24):
            log.record(metrics(step))
    with Journal(tmp_path / "journal.jsonl") as journal:
        for now, commands, reason in ((1.0, [{"type": "Standby"}], "w-7 stands by"), (2.0, [], "nothing due")):
            event = {"type": "Tick", "cause": "t"}
            journal.append({"now": now, "event": event, "commands": commands, "reason": reason})
    write_json(tmp_path / "status.json", live_status())
    return tmp_path


# ------------------------------------------------------------------------------------------ sentence


def test_a_recovery_is_one_sentence() -> None:
    assert recovery_line(Recovery(**RECOVERY)) == SENTENCE


def test_a_sentence_names_its_step_once_and_only_what_took_place() -> None:
    told = {
        **RECOVERY,
        "cause": "ranks 1 and 2 died in step 4",
        "action": "mesh shrank",
        "total_s": 12.34,
        "heal_s": None,
        "rerun_s": None,
        "steps_undone": 2,
    }
    assert recovery_line(Recovery(**told)) == (
        "ranks 1 and 2 died in step 4; mesh shrank in 12 s: detect 0.02, close 0.11; 2 steps undone"
    )
    assert recovery_line(Recovery(**{**told, "cause": "node b left", "step": 9, "steps_undone": 1})) == (
        "node b left in step 9; mesh shrank in 12 s: detect 0.02, close 0.11; 1 step undone"
    )


def test_numbers_are_as_long_as_they_are_worth() -> None:
    times = [0.0, 0.0031, 0.02, 0.4, 0.114, 1.0, 1.25, 9.96, 34.2, 100.0, None]
    assert [seconds(s) for s in times] == [
        "0",
        "0.003",
        "0.02",
        "0.4",
        "0.11",
        "1",
        "1.2",
        "10",
        "34",
        "100",
        "?",
    ]
    assert [human_rate(v) for v in (0, 950.4, 9120, 12345, 123456, 4.56e6)] == [
        "0",
        "950",
        "9.12k",
        "12.3k",
        "123k",
        "4.56M",
    ]


# ------------------------------------------------------------------------------------------ progress


def test_without_a_terminal_there_are_plain_lines_now_and_then_and_the_last_one() -> None:
    now_s = 0.0
    stream = io.StringIO()
    with ProgressLine(stream, 40, plain_every_s=5.0, clock=lambda: now_s).open() as progress:
        for step in range(9):
            progress.step(metrics(step))
            now_s += 1.0
        progress.note(recovery_line(Recovery(**RECOVERY)))
    assert stream.getvalue().splitlines() == [
        "step  1/40  loss 5.0000  lr 0.001  grad 1  9.12k tok/s  gen 1  4 members (dp=2 x cp=2)",
        "step  6/40  loss 4.5000  lr 0.001  grad 1  9.12k tok/s  gen 1  4 members (dp=2 x cp=2)  34 s left",
        SENTENCE,
        "step  9/40  loss 4.2000  lr 0.001  grad 1  9.12k tok/s  gen 1  4 members (dp=2 x cp=2)  35 s left",
    ]


def test_where_a_run_goes_back_the_progress_does_so_too_and_takes_its_pace_from_there() -> None:
    now_s, stream = 0.0, io.StringIO()
    with ProgressLine(stream, 40, plain_every_s=0.0, clock=lambda: now_s).open() as progress:
        for step in (18, 19, 10, 11):
            progress.step(metrics(step))
            now_s += 2.0
    shown = [
        (line.split("/")[0], line.partition("(dp=2 x cp=2)")[2].strip()) for line in stream.getvalue().splitlines()
    ]
    assert shown == [("step 19", ""), ("step 20", "40 s left"), ("step 11", ""), ("step 12", "56 s left")]


def test_a_skipped_step_says_so() -> None:
    stream = io.StringIO()
    with ProgressLine(stream, 4).open() as progress:
        progress.step(metrics(0, loss=float("nan"), skipped=True))
    assert "loss nan (skipped)" in stream.getvalue()


def on_a_terminal(columns: int) -> str:
    """What a progress line of five steps and a recovery writes to a terminal of that width."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    with os.fdopen(slave, "w") as stream, ProgressLine(stream, 40).open(first_step=20) as progress:
        for step in range(19, 25):  # step 19 was reported before the restart too
            progress.step(metrics(step))
            if step == 21:
                progress.note(recovery_line(Recovery(**RECOVERY)))
    written = b""
    with contextlib.suppress(OSError):  # EIO: all is read and the other end is closed
        while part := os.read(master, 1 << 16):
            written += part
    os.close(master)
    return written.decode()


def test_on_a_terminal_a_bar_redraws_itself_and_recoveries_stay_above_it() -> None:
    screen = on_a_terminal(140)
    lines = screen.split("\n")
    assert any(line.strip("\r").endswith(SENTENCE) for line in lines)
    last = lines[-2].split("\r")[-2]
    assert last.startswith("25/40 |")
    assert "loss 2.6000  lr 0.001  grad 1  9.12k tok/s  gen 2  4 members (dp=2 x cp=2)" in last
    assert screen.count("\r") > len(lines)


def test_a_terminal_without_a_width_gets_plain_lines() -> None:
    assert on_a_terminal(0).splitlines()[-1].startswith("step 25/40  loss 2.6000")


# -------------------------------------------------------------------------------------------- status


def test_the_status_of_a_live_run(run: Path) -> None:
    told = re.sub(r"\d+ s left", "soon", render_status(run, now_unix_s=5002.5))
    assert told.splitlines() == [
        "run laptop: running, news of 2.5 s ago",
        "  mesh       dp=2 x cp=2   generation 3   term 2",
        "  step       24 of 40   loss 2.7000 (step 23)   9.12k tokens/s   soon",
        "  rates      learning rate 0.001   gradient norm 1   fullest expert 1.25 times its fair share",
        "  members    rank 0   w-0   node node-a   pid 100",
        "             rank 2   w-2   node node-a   pid 102",
        "  spares     w-7",
        "  recoveries " + SENTENCE,
        "  decision   w-7 stands by",
    ]


def test_the_time_left_follows_the_pace_without_breaks(run: Path) -> None:
    lines = [{"unix_s": 10.0 * step + (5000.0 if step > 4 else 0.0)} for step in range(9)]
    assert left_s(lines, 6) == 60.0
    assert (left_s(lines, 0), left_s(lines[:1], 6)) == (None, None)
    back = [{"unix_s": at} for at in (50.0, 40.0, 30.0)]  # a clock that was set back
    assert left_s(back, 6) is None
    assert left_s([*back, {"unix_s": 32.0}, {"unix_s": 34.0}, {"unix_s": 36.0}], 6) == 12.0
    assert [duration(s) for s in (40, 720, 12_600, 43_200, 200_000)] == ["40 s", "12 min", "3.5 h", "12 h", "2.3 days"]
    with MetricsLog(run) as log:
        log.validated(20, {"val_loss": 2.0, "val_perplexity": 7.389, "val_code_loss": math.nan})
    assert "validated  loss 2, perplexity 7.389, code_loss not finite (step 20)" in render_status(
        run, now_unix_s=5000.0
    )


def test_a_run_that_fell_silent_says_for_how_long(run: Path) -> None:
    first = render_status(run, now_unix_s=5123.4).splitlines()[0]
    assert first == "run laptop: running, but no news for 123 s: its coordinator is gone or stuck"
    write_json(run / "status.json", live_status(ended=True, phase="ended"))
    assert render_status(run, now_unix_s=9e9).splitlines()[0] == "run laptop: ended"
    write_json(run / "status.json", live_status(ended=True, error="ShardLost: cp_rank 1"))
    assert render_status(run, now_unix_s=9e9).splitlines()[0] == "run laptop: failed: ShardLost: cp_rank 1"
    write_json(run / "status.json", live_status(ended=True, error="stopped by the user"))
    assert render_status(run, now_unix_s=9e9).splitlines()[0] == "run laptop: stopped by the user"


@pytest.mark.parametrize("ahead_s", [-3600.0, 70.0])
def test_whether_a_run_lives_is_what_its_status_does_and_not_its_age_by_another_hosts_clock(
    run: Path, ahead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_ring.monitor.metrics.WATCHED_S", 0.5)
    looks = []

    def look() -> Path:
        looks.append(len(looks))
        if is_live:
            write_json(run / "status.json", live_status(updated_unix_s=5000.0 + len(looks)))
        return run

    for is_live in (True, False):
        text = render_status(run, now_unix_s=5000.0 - ahead_s, look=look)
        clock = f"with news; its host's clock is {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}"
        expected = (True, False, False) if is_live else (False, True, True)
        doubts = "no news for", "members and spares are those of the last news"
        assert (clock in text, *(doubt in text for doubt in doubts)) == expected, text
    assert looks


def test_intervals_without_a_checkpoint_are_in_the_status_from_the_third_on(run: Path) -> None:
    for number, told in ((2, False), (3, True)):
        write_json(run / "status.json", live_status(checkpoint_intervals_missed=number, checkpoint_step=8))
        assert ("no checkpoint for 3 intervals, since step 8" in render_status(run, now_unix_s=5000.0)) == told


def test_waits_for_data_are_in_the_status_once_they_are_long(run: Path) -> None:
    for share, told in ((0.19, False), (0.37, True)):
        write_json(run / "status.json", live_status(data_wait_share=share))
        assert ("data       waited for in 37% of the last steps' time" in render_status(run, now_unix_s=5000.0)) == told


def test_an_ended_run_has_no_members_and_a_silent_one_those_of_its_last_news(run: Path) -> None:
    doubt = "members and spares are those of the last news, and may be gone"
    assert doubt not in render_status(run, now_unix_s=5000.0)
    silent = render_status(run, now_unix_s=5123.4)
    assert "w-0" in silent
    assert doubt in silent
    write_json(run / "status.json", live_status(ended=True, phase="ended"))
    ended = render_status(run, now_unix_s=9e9)
    assert "members    none any more" in ended
    assert not any(word in ended for word in ("w-0", "pid", doubt))


def test_the_versions_of_a_run_are_shown_where_they_are_recorded(run: Path) -> None:
    write_json(run / "config.json", {"digest": "a", "versions": {"elastic_ring": "0.1.0", "torch": "2.13.0"}})
    assert render_status(run, now_unix_s=5000.0).splitlines()[1] == "  versions   elastic_ring 0.1.0, torch 2.13.0"
    write_json(run / "config.json", {"digest": "a"})
    assert "versions" not in render_status(run, now_unix_s=5000.0)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: path.touch(), "config.json is empty"),
        (lambda path: path.write_text("[]"), "config.json is not a JSON object"),
        (lambda path: path.write_bytes(b"\xff"), "config.json is not JSON: 'utf-8' codec"),
        (lambda path: path.mkdir(), "config.json is no regular file"),
    ],
    ids=["empty", "a list", "no text", "a folder"],
)
def test_a_record_of_the_settings_that_cannot_be_read_costs_the_line_of_the_versions_only(
    run: Path, spoil: Callable[[Path], Any], why: str
) -> None:
    without = render_status(run, now_unix_s=5000.0).splitlines()
    spoil(run / "config.json")
    told = render_status(run, now_unix_s=5000.0).splitlines()
    assert told[1].startswith("  versions   config.json cannot be read (")
    assert why in told[1]
    assert [told[0], *told[2:]] == without


def test_so_does_one_that_may_not_be_read_or_whose_versions_are_none(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(run / "config.json", {"versions": {"torch": "2.13.0"}})

    def refuse(path: Path) -> bytes:
        if path.name == "config.json":
            raise PermissionError(13, "Permission denied", str(path))
        return read_small(path)

    monkeypatch.setattr(json_files, "read_small", refuse)
    assert "  versions   config.json cannot be read ([Errno 13] Permission denied" in render_status(run)
    (run / "config.json").unlink()
    monkeypatch.undo()
    write_json(run / "config.json", {"versions": ["torch"]})
    assert "versions" not in render_status(run)


def test_only_the_last_recoveries_are_shown_with_their_number(run: Path) -> None:
    many = [{**RECOVERY, "step": step} for step in range(12)]
    write_json(run / "status.json", live_status(recoveries=many, spares=[]))
    text = render_status(run, now_unix_s=5000.0)
    assert "recoveries 12, the last 5:" in text
    assert [f"of step {step};" in text for step in range(12)] == [False] * 7 + [True] * 5
    assert "spares     none: the next failure makes the mesh smaller" in text


def test_goodput_says_where_the_rest_of_the_time_went() -> None:
    parts = {"steps": 31.0, "startup": 30.9, "waiting": 0.0, "checkpoint": 2.04, "other": 8.0, "recovery": 0.2}
    assert goodput_line({"goodput": 0.43, "time_s": parts}) == (
        "goodput 43% of 72 s; the rest: start 31 s, compiling, writing the weights and other 8 s, checkpoints 2 s"
    )
    assert goodput_line({"goodput": 1.0, "time_s": {"steps": 7200.0, "startup": 30.9}}) == "goodput 100% of 7231 s"
    assert set(TIME_NAMES) == set(TIME_PARTS) - {"steps"}


def test_an_ended_run_is_shown_from_its_summary_alone(run: Path) -> None:
    for name in ("status.json", "journal.jsonl", "metrics.jsonl"):
        (run / name).unlink()
    mesh = {"dp": 2, "cp": 2}
    summary = Summary(
        steps=40,
        planned_steps=40,
        losses=[(1.0).hex()] * 40,
        weights_sha256="abc",
        samples_sha256="def",
        goodput=0.934,
        exact=True,
        generations=[GenerationBegan(1, number, mesh, "formed") for number in (1, 2)],
        recoveries=[Recovery.from_json(RECOVERY)],
    )
    write_json(run / "summary.json", summary.to_json())
    assert render_status(run).splitlines() == [
        f"run {run.name}: ended",
        "  mesh       dp=2 x cp=2   generation 2   term 1",
        "  step       40 of 40",
        "  recoveries " + SENTENCE,
        "  goodput    93.4 %   exact: yes",
        "  weights    sha256 abc",
    ]


@pytest.mark.parametrize(
    ("planned_gib", "says"),
    [
        (107.8, "peak 110.1 GiB of tensors, planned 107.8 GiB"),
        (None, "peak 110.1 GiB of tensors"),
        (90.0, "peak 110.1 GiB of tensors, planned 90.0 GiB: 22 % more than planned"),
        (130.0, "peak 110.1 GiB of tensors, planned 130.0 GiB: 15 % less than planned"),
    ],
)
def test_the_measured_peak_stands_beside_the_planned_one(run: Path, planned_gib: float | None, says: str) -> None:
    planned = {"planned_gpu_bytes": int(planned_gib * 2**30)} if planned_gib is not None else {}
    write_json(run / "config.json", planned)
    member = {"global_rank": 0, "worker": "a", "node": "n", "pid": 1, "peak_rss_bytes": 3 << 30}
    write_json(run / "status.json", live_status(peak_gpu_bytes=int(110.1 * 2**30), members=[member]))
    lines = render_status(run, now_unix_s=5000.0).splitlines()
    assert f"  GPU memory {says}" in lines
    assert "  memory     peak 3.00 GiB of a worker's process" in lines


def test_a_run_that_is_just_beginning_has_a_status(tmp_path: Path) -> None:
    early = {"mesh": None, "members": [], "spares": [], "recoveries": [], "phase": "forming", "step": 0}
    write_json(tmp_path / "status.json", live_status(**early))
    text = render_status(tmp_path, now_unix_s=5000.0)
    assert "run laptop: forming" in text
    assert "mesh       none yet" in text
    assert "recoveries none" in text


def test_a_line_that_is_being_written_does_not_disturb_the_status(run: Path) -> None:
    for name in ("journal.jsonl", "metrics.jsonl"):
        with (run / name).open("ab") as file:
            file.write(b'{"step": 24, "lo')
    assert "24 of 40   loss 2.7000 (step 23)" in render_status(run, now_unix_s=5000.0)


# ---------------------------------------------------------------------------------------- status job


def status_job(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, STATUS_JOB, *arguments]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)


def test_the_job_prints_the_status_and_succeeds(run: Path) -> None:
    write_json(run / "status.json", live_status(ended=True))
    done = status_job(run)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == render_status(run)


def test_the_job_shows_what_else_is_known_where_a_power_cut_left_no_status(run: Path) -> None:
    (run / "status.json").write_text("{")
    done = status_job(run)
    assert (done.returncode, "status.json is missing or cannot be read" in done.stdout) == (0, True)
    assert f"  damaged    {run}/status.json is not JSON" in done.stdout
    assert "  step       24" in done.stdout


def test_the_job_refuses_what_is_no_run_and_says_why(tmp_path: Path, run: Path) -> None:
    missing = status_job(tmp_path / "nowhere")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr.startswith(f"elastic-ring status: run folder {tmp_path}/nowhere: there is no such folder")
    (tmp_path / "empty").mkdir()
    empty = status_job(tmp_path / "empty")
    assert (empty.returncode, "holds no status.json" in empty.stderr) == (2, True)
    write_json(run / "status.json", live_status())
    (run / "journal.jsonl").write_text("?\n" + (run / "journal.jsonl").read_text())
    damaged = status_job(run)
    assert (damaged.returncode, f"  damaged    line 1 of {run}/journal.jsonl" in damaged.stdout) == (0, True)
    assert "Traceback" not in missing.stderr + empty.stderr + damaged.stderr


def test_watching_shows_the_news_until_it_is_interrupted(run: Path) -> None:
    command = [sys.executable, STATUS_JOB, run, "--watch", "0.05"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, preexec_fn=heed_interrupts, **pipes) as watching:
        assert watching.stdout is not None
        assert "laptop" in watching.stdout.readline()
        write_json(run / "status.json", live_status(run="renamed", ended=True))
        assert any("renamed" in line for line in watching.stdout)
        watching.send_signal(2)
        _, errors = watching.communicate()
    assert (watching.returncode, errors) == (0, "")


# ------------------------------------------------------------------------------------------- picture


def test_the_picture_marks_recoveries_and_needs_no_display(run: Path) -> None:
    plain = matplotlib.image.imread(draw_run(run, []))
    marked = matplotlib.image.imread(draw_run(run, [Recovery(**RECOVERY)], [12]))
    assert marked.shape == plain.shape
    height, width, _ = marked.shape
    assert min(height, width) > 400
    red = (marked[..., 0] > 0.6) & (marked[..., 1] < 0.35) & (marked[..., 2] < 0.35)
    assert not ((plain[..., 0] > 0.6) & (plain[..., 1] < 0.35)).any()
    columns = red.sum(axis=0)
    assert columns.max() > height / 3  # a dashed line from top to bottom
    assert "matplotlib.pyplot" not in sys.modules


def test_labels_in_the_picture_are_short() -> None:
    first = "rank 3 died in backward of step 21 (killed by SIGKILL)"
    long = f"{first}; rank 1 hung in vote of step 21 (x); w-9 drained"
    assert short_cause(long) == "rank 3 died in backward +2"
    assert short_cause("the coordinator died") == "the coordinator died"
    assert short_cause("word " * 30) == "word word word word word word word wo..."


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_short_and_broken_runs_have_a_picture_too(tmp_path: Path, num_steps: int) -> None:
    with MetricsLog(tmp_path) as log:
        for step in range(num_steps):
            log.record(metrics(step, loss=float("nan") if step == 1 else 2.0, skipped=step == 1))
    recoveries = [Recovery(**{**RECOVERY, "step": step, "total_s": None}) for step in range(40 if num_steps else 0)]
    path = draw_run(tmp_path, recoveries)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_where_the_time_of_a_step_goes_is_told_with_the_rank_that_took_longest(run: Path) -> None:
    clock = {
        "idle": 0.0,
        "forward": 0.5,
        "backward": 1.0,
        "reduce": 0.0,
        "vote": 0.0,
        "update": 0.0,
        "apply": 0.1,
        "other": 0.0,
        "data": 0.0,
    }
    status = live_status()
    for member, forward_s in zip(status["members"], (1.5, 0.5), strict=True):
        member["clock"] = {**clock, "forward": forward_s}
    write_json(run / "status.json", status)
    text = render_status(run, now_unix_s=5001.0)
    assert "  clock      forward 1 (rank 2: 1.5), backward 1 (rank 0: 1), apply 0.1 (rank 0: 0.1)   s a step" in text


# ------------------------------------------------------------------------------------------ in an object store


def test_the_status_of_a_run_in_a_store_is_that_of_its_folder_and_needs_neither_ray_nor_the_folder(
    run: Path, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    object_store.enter(monkeypatch)
    stored = RunConfig("laptop", storage_path=f"s3://{object_store.new_bucket()}/runs")
    stored.folder.mkdir(parents=True)
    for path in run.iterdir():
        (stored.folder / path.name).write_bytes(path.read_bytes())
    run_storage.Mirror(stored, 1).flush()
    shutil.rmtree(stored.folder)  # as on another machine
    assert (status.main([str(run)]), there := capsys.readouterr().out) == (0, there)
    assert status.main([stored.storage_uri]) == 0
    here = capsys.readouterr().out
    # Its first line says how old the news are.
    assert (here.splitlines()[1:], "rank 3 died in backward" in here) == (there.splitlines()[1:], True)
    assert status.main([f"{stored.storage_uri}-none"]) == 2
    assert "holds no run" in capsys.readouterr().err
