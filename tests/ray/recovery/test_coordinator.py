"""The coordinator and the agents die at awkward moments: the run goes on, and its records stay whole."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import signal
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from benchmarks.harness.runs import actor_pids
from elastic_ring import Callback, CheckpointConfig, EarlyStopping
from elastic_ring.data.sampling.validation import ValidationSet, measured
from elastic_ring.data.source import TextFiles, open_source
from elastic_ring.errors import JournalDamaged, RunFailed, StorageFailed
from elastic_ring.monitor.journal import Journal
from elastic_ring.monitor.json_files import read_json
from elastic_ring.monitor.metrics import read_metrics, write_json
from elastic_ring.monitor.report import render_status
from elastic_ring.runtime.agent.stamp_dir import hold, stamp_folder
from elastic_ring.runtime.coordinator.actor import Coordinator
from elastic_ring.runtime.coordinator.run_spec import RunSpec
from elastic_ring.runtime.coordinator.startup import MOST_FAILED_STARTS
from elastic_ring.runtime.driver.cluster import NAMESPACE, actor_name, left_behind
from elastic_ring.runtime.driver.follow import Follower
from elastic_ring.runtime.driver.submission import Submission
from tests.ray.conftest import (
    ALONE,
    Heard,
    bits,
    fault_free,
    finished,
    notes,
    num_steps,
    pids,
    status,
    tiny_trainer,
    wait_for,
)


@pytest.mark.slow
def test_two_drivers_follow_one_run_and_both_hear_how_it_ends(local_ray, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    gate = tmp_path / "gate"
    heard = [Heard(), Heard()]
    trainers = [tiny_trainer(tmp_path, "followed", steps=6, gate=gate, callbacks=(one,), **ALONE) for one in heard]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(trainers[0].fit)
        recorded = tmp_path / "followed" / "config.json"
        wait_for(lambda: (tmp_path / "followed" / "metrics.jsonl").exists(), recorded.exists)
        config = json.loads(recorded.read_text())
        config["versions"]["torch"] = "0.1"
        write_json(recorded, config)
        second = pool.submit(trainers[1].fit)
        wait_for(lambda: "attached to run followed" in caplog.text)
        gone = ray.get_actor(actor_name("followed", "coordinator"), namespace=NAMESPACE)
        gate.touch()
        block_means = [run.result().summary for run in (first, second)]
    assert block_means[0] == block_means[1]
    (warned,) = [line for line in caplog.messages if "other versions" in line]
    assert "torch 0.1 there" in warned
    assert block_means[0]["steps"] == 6
    # Whichever of the two came late met a coordinator that is gone, as this one does for certain.
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(gone.identity.remote())
    assert Follower(trainers[1].submission(), ())._follow(gone, "")["summary"] == block_means[0]
    both = sorted(heard[0].losses + heard[1].losses)
    assert both == list(enumerate(block_means[0]["losses"])), "each step was told to one of the two drivers, once"
    assert left_behind("followed") == []


@pytest.mark.slow
def test_a_submission_that_attaches_brings_its_intervals_and_says_what_the_run_does_not_take_over(
    local_ray, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    folder, gate = tmp_path / "attached", tmp_path / "gate"
    before, after = CheckpointConfig(every_steps=1000), CheckpointConfig(every_steps=2, keep_last=4)
    first, second = (
        tiny_trainer(tmp_path, "attached", steps=40, gate=gate, **ALONE, run={"checkpoint_config": config, **more})
        for config, more in ((before, {}), (after, {"straggler": "off"}))
    )

    def saved() -> list[int]:
        return sorted(int(path.parts[-3].removeprefix("step-")) for path in folder.glob("checkpoints/*/*/COMMIT.json"))

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(first.fit)]
        wait_for(lambda: num_steps(folder) > 2)
        runs.append(pool.submit(second.fit))
        wait_for(lambda: len(saved()) == 4)
        (pid,) = actor_pids("Coordinator")
        os.kill(pid, signal.SIGKILL)
        killed_at = num_steps(folder)
        wait_for(lambda: saved()[-1] > killed_at + 2)
        assert len(saved()) <= 5
        gate.touch()
        assert [run.result().summary["steps"] for run in runs] == [40, 40]
    assert (
        "attached to run attached; it takes over checkpoint.every_steps=2 (it has 1000), checkpoint.keep_last=4 "
        in (caplog.text)
    )
    assert "; it does not take over straggler=off (it has log): for that, stop it first" in caplog.text
    assert left_behind("attached") == []


@pytest.mark.slow
def test_a_submission_that_overlaps_the_end_of_its_run_takes_the_result_and_moves_nothing(
    local_ray, tmp_path, monkeypatch
):
    first = tiny_trainer(tmp_path, "overlap", steps=2, **ALONE).fit()
    late, known = tiny_trainer(tmp_path, "overlap", steps=2, **ALONE), []
    look = Submission.finished_summary

    def not_yet_at_the_first_look(submission: Submission) -> dict[str, Any] | None:
        known.append(look(submission))
        return known[-1] if len(known) > 1 else None

    monkeypatch.setattr(Submission, "finished_summary", not_yet_at_the_first_look)
    assert late.fit().summary == first.summary
    assert list(first.path.glob("attempt-*")) == []


@pytest.mark.soak
def test_a_death_while_the_ring_validates_loses_neither_a_bit_nor_a_validation(local_ray, tmp_path):
    block_means, validations, heard = [], [], []
    for name, faults in (("calm-held-out", ""), ("held-out", "kill@step=4,phase=idle,rank=0")):
        heard.append(Heard())
        trainer = tiny_trainer(tmp_path, name, steps=6, faults=faults, callbacks=(heard[-1],), val_every_steps=2)
        result = trainer.fit()
        block_means.append(result.summary)
        validations.append({line["step"]: line["val_loss"] for line in read_metrics(result.path)})
    assert [summary["weights_sha256"] for summary in block_means] == [block_means[0]["weights_sha256"]] * 2
    assert [len(summary["recoveries"]) for summary in block_means] == [0, 1]
    assert validations[0] == validations[1]
    assert [step for step, loss in validations[0].items() if loss is not None] == [1, 3, 5]
    for one, summary in zip(heard, block_means, strict=True):
        one.check(summary)
        assert one.validations == [(step, loss) for step, loss in validations[0].items() if loss is not None]


class Stops(Callback):
    """Keeps the checkpoint of its first validation, and stops at its second; before, it may kill the coordinator."""

    controls = True

    def __init__(self, kills: bool) -> None:
        self.kills = kills

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 1:
            self.control.checkpoint(keep=True)
            return
        if self.kills:
            (pid,) = actor_pids("Coordinator")
            os.kill(pid, signal.SIGKILL)
        self.control.stop(f"step {step} is enough")


@pytest.mark.slow
def test_a_callback_stops_the_run_at_the_same_step_though_it_kills_the_coordinator(local_ray, tmp_path):
    found = []
    (tmp_path / "own.txt").write_text("A corpus of its own. " * 40)
    sets = {
        "held": ValidationSet(),
        "own": ValidationSet(TextFiles(96, (str(tmp_path / "own.txt"),)), weight=3.0, num_sequences=5),
    }
    for name, kills in (("calm-stop", False), ("stop", True)):
        checkpoints = CheckpointConfig(every_steps=1, keep_last=1)
        trainer = tiny_trainer(
            tmp_path,
            name,
            callbacks=(Stops(kills), EarlyStopping("val_own_loss")),
            val_every_tokens=2 * 6 * 96,
            validation=sets,
            run={"checkpoint_config": checkpoints},
            **ALONE,
        )
        result = trainer.fit()
        summary = result.summary
        assert summary["stopped"] == "Stops: step 3 is enough"
        left = {path.name for path in (result.path / "checkpoints").glob("step-*")}
        assert left == {"step-00000002", "step-00000004"}
        saved = [one["step"] for one in summary["checkpoints"]]
        assert saved == sorted(set(saved)), "a step that its schedule saves is not saved once more for a callback"
        found.append([summary[name] for name in ("steps", "losses", "weights_sha256", "samples_sha256", "validation")])
        told = [line for line in read_metrics(result.path) if line.get("val_loss") is not None]
        assert [line["step"] for line in told] == [1, 3]
        assert all(name in told[-1] for name in measured(sets, ()))
        assert told[-1]["val_loss"] == pytest.approx((told[-1]["val_held_loss"] + 3 * told[-1]["val_own_loss"]) / 4)
        assert "own_perplexity" in render_status(result.path)
        assert trainer.fit().summary == summary, "a run that was stopped is finished"
    assert found[0] == found[1]
    assert found[0][0] == 4
    assert len(notes(tmp_path / "stop", "term")) == 2, "the coordinator did not die"


@pytest.mark.slow
def test_a_coordinator_that_died_before_the_summary_was_written_writes_it_when_it_comes_back(local_ray, tmp_path):
    trainer = tiny_trainer(tmp_path, "last-words", steps=3, **ALONE)
    first = trainer.fit()
    (first.path / "summary.json").unlink()
    (begin,) = notes(first.path, "begin")
    fingerprint = open_source(trainer.task.data).fingerprint
    run_spec = RunSpec(trainer.run_config, trainer.scaling_config, trainer.task, begin["attempt"], "", fingerprint)
    name = actor_name("last-words", "coordinator")
    again = (
        ray.remote(Coordinator)
        .options(name=name, namespace=NAMESPACE, lifetime="detached", max_concurrency=8, num_cpus=0)
        .remote(run_spec)
    )
    wait_for(lambda: ray.get(again.follow.remote(-1))["ended"] is not None)
    ended = ray.get(again.follow.remote(-1))["ended"]
    ray.kill(again)
    assert ended["error"] == ""
    written = read_json(first.path / "summary.json")
    assert ended["summary"] == written
    assert {**written, "goodput": 0, "time_s": 0} == {**first.summary, "goodput": 0, "time_s": 0}
    assert left_behind("last-words") == []


@pytest.mark.slow
def test_a_coordinator_that_dies_while_the_ring_is_being_built_changes_no_bit(local_ray, tmp_path, undisturbed):
    calm = fault_free(undisturbed, tmp_path)
    faults = "kill@step=3,phase=backward,rank=1; kill-coordinator@step=3,phase=heal,role=donor"
    summary = finished(tiny_trainer(tmp_path, "mid-build", spares=1, faults=faults)).summary
    assert bits(summary) == bits(calm)
    assert summary["exact"]
    assert max(generation["term"] for generation in summary["generations"]) == 2
    assert [len(recovery["faults"]) for recovery in summary["recoveries"]] == [2]


@pytest.mark.slow
def test_a_run_removes_the_stamps_of_a_run_that_is_gone_and_leaves_none_of_its_own(local_ray, tmp_path):
    gone, used = (stamp_folder(name, secrets.token_hex(8)) for name in ("stamps-of-the-dead", "stamps-in-use"))
    os.close(hold(gone, 30.0))
    held = hold(used, 30.0)
    try:
        tiny_trainer(tmp_path, "tidy", steps=2, **ALONE).fit()
        assert not gone.exists()
        assert used.exists()
    finally:
        os.close(held)
        shutil.rmtree(used)
    wait_for(lambda: not list(used.parent.glob("elastic_ring-tidy-*")))


@pytest.mark.slow
def test_a_frozen_agent_is_replaced_and_the_next_death_is_seen_by_the_new_one(local_ray, tmp_path):
    gate, folder = tmp_path / "gate", tmp_path / "agent"
    trainer = tiny_trainer(tmp_path, "agent", spares=1, steps=20, gate=gate)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(trainer.fit)
        wait_for(lambda: num_steps(folder) > 1)
        (frozen,) = actor_pids("NodeAgent")
        os.kill(frozen, signal.SIGSTOP)
        wait_for(lambda: any(pid != frozen for pid in actor_pids("NodeAgent")))
        wait_for(lambda: not psutil.pid_exists(frozen) or psutil.Process(frozen).status() == psutil.STATUS_ZOMBIE)
        before = pids(folder)
        os.kill(before[1], signal.SIGKILL)
        wait_for(lambda: len(notes(folder, "recovery")) > 0)
        wait_for(lambda: pids(folder)[1] not in (0, before[1]))
        after = pids(folder)
        gate.touch()
        summary = run.result().summary
    assert [after[rank] for rank in (0, 2, 3)] == [before[rank] for rank in (0, 2, 3)]
    (recovery,) = summary["recoveries"]
    assert recovery["survivor_pids_kept"]
    assert "killed by SIGKILL" in recovery["cause"], "only an agent can tell the signal"
    assert summary["exact"]
    assert left_behind("agent") == []


@pytest.mark.slow
@pytest.mark.parametrize("comes_back", [True, False])
def test_a_run_whose_folder_is_moved_away_makes_none_anew_and_goes_on_once_it_is_back_or_ends_by_its_limit(
    local_ray, tmp_path, capsys, comes_back
):
    folder, away, gate, heard = tmp_path / "moved", tmp_path / "moved.old", tmp_path / "gate", Heard()
    kept = {"checkpoint_config": CheckpointConfig(every_steps=1, fail_after_s=3600.0 if comes_back else 5.0)}
    trainer = tiny_trainer(tmp_path, "moved", steps=40, gate=gate, run=kept, callbacks=(heard,), **ALONE)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(trainer.fit)
        wait_for(lambda: num_steps(folder) > 2)
        folder.rename(away)
        said, num_before = list[str](), num_steps(away)
        wait_for(lambda: said.append(capsys.readouterr().err) or "was moved, removed or unmounted" in "".join(said))
        if comes_back:
            wait_for(lambda: num_steps(away) > num_before + 3)  # the open files moved along
        assert not folder.exists(), "no checkpoint, status or record of callbacks made it anew"
        if comes_back:
            away.rename(folder)
            gate.touch()
            summary = run.result().summary
            assert (summary["steps"], [step for step, _ in heard.losses]) == (40, list(range(40)))
            assert summary["samples_sha256"]
            assert summary["exact"]
            assert not away.exists()
        else:
            with pytest.raises(StorageFailed, match=r"was moved, removed or unmounted"):
                run.result()
            assert not folder.exists()
    assert left_behind("moved") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("no-journal", r"no journal of run no-journal is in .*have built generation 1.*goes on from its newest"),
        ("odd-journal", "KeyError"),
        ("other-format", r"journal\.jsonl has format 1, and this version of elastic_ring reads format 2"),
    ],
)
def test_a_coordinator_that_cannot_begin_for_its_journal_ends_the_run(local_ray, tmp_path, name, error):
    folder, gate = tmp_path / name, tmp_path / "gate"
    trainer = tiny_trainer(tmp_path, name, steps=40, gate=gate, **ALONE)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(trainer.fit)
        wait_for(lambda: num_steps(folder) > 2)
        coordinator = ray.get_actor(actor_name(name, "coordinator"), namespace=NAMESPACE)
        process = psutil.Process(ray.get(coordinator.identity.remote()).pid)
        process.suspend()
        if name == "no-journal":
            folder.rename(tmp_path / "elsewhere")
        elif name == "other-format":
            with (folder / "journal.jsonl").open("ab") as file:
                file.write(b'{"n":1,"crc":"%08x"}\n' % zlib.crc32(b'{"n":1}'))
        else:
            with Journal(folder / "journal.jsonl") as journal:
                journal.append({"note": "checkpoint", "checkpoint": {}, "unix_s": 0.0})
        process.kill()
        with pytest.raises(RunFailed, match=error):
            run.result()
    assert left_behind(name) == []
    if name == "odd-journal":
        assert len(notes(folder, "term")) == 1 + MOST_FAILED_STARTS
    elif name == "no-journal":
        assert not folder.exists(), "nothing makes the folder anew"


def cut(folder: Path, lines: Callable[[list[bytes]], list[bytes]], *, keeps_status: bool = False) -> None:
    """Leaves these lines of the journal, in the same file, and the old status or none."""
    path = folder / "journal.jsonl"
    data = b"".join(lines(path.read_bytes().splitlines(keepends=True)))
    path.write_bytes(data)
    if not keeps_status:
        (folder / "status.json").unlink()


def before_build_2(lines: list[bytes]) -> list[bytes]:
    at = next(k for k, line in enumerate(lines) if b'"type":"Build"' in line and b'"generation":2' in line)
    return lines[:at]


def before_the_first_worker(lines: list[bytes]) -> list[bytes]:
    return lines[: next(k for k, line in enumerate(lines) if b'"type":"StartWorker"' in line)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lines", "keeps_status", "error"),
    [
        ("to-0", lambda lines: [], False, r"no journal of run to-0 is in .*goes on from its newest checkpoint"),
        ("half", lambda lines: lines[: len(lines) // 2], True, r"ends after line \d+, and \d+ had been written"),
        ("last", lambda lines: lines[:-1], True, r"ends after line \d+, and \d+ had been written"),
        (
            "build",
            before_build_2,
            False,
            r"ends after line \d+ and knows generation 1 as the newest, but w\d+\.t1 is in",
        ),
        ("workers", before_the_first_worker, False, r"ends after line \d+ and lacks workers that this run has started"),
    ],
)
def test_a_coordinator_that_dies_after_its_journal_was_cut_ends_the_run(
    local_ray, tmp_path, name, lines, keeps_status, error
):
    """With the status, or by the members alone: without it, a copy of the whole folder of before was put there."""
    folder, gate = tmp_path / name, tmp_path / "gate"
    mesh = {**ALONE, "dp": 1 + (name == "build")}
    trainer = tiny_trainer(tmp_path, name, steps=40, gate=gate, **mesh)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(trainer.fit)
        wait_for(lambda: num_steps(folder) > 2)
        coordinator = ray.get_actor(actor_name(name, "coordinator"), namespace=NAMESPACE)
        process = psutil.Process(ray.get(coordinator.identity.remote()).pid)
        if name == "build":
            ray.get(coordinator.scale.remote(1, None))
            wait_for(lambda: status(folder)["generation"] == 2)
        time.sleep(2.0)  # the status is of every second
        process.suspend()
        cut(folder, lines, keeps_status=keeps_status)
        process.kill()
        with pytest.raises((RunFailed, JournalDamaged), match=error):
            run.result()
    assert left_behind(name) == []
    assert not (folder / "summary.json").exists()


@pytest.mark.slow
def test_a_coordinator_whose_journal_is_cut_says_so_trains_on_and_its_successor_ends_the_run(
    local_ray, tmp_path, capsys
):
    folder, gate, heard = tmp_path / "live", tmp_path / "gate", list[str]()
    trainer = tiny_trainer(tmp_path, "live", steps=60, gate=gate, **ALONE)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(trainer.fit)
        wait_for(lambda: num_steps(folder) > 2)
        cut(folder, lambda lines: lines[:-1])
        wait_for(
            lambda: heard.append(capsys.readouterr().err) or "was cut or replaced: training goes on" in "".join(heard)
        )
        wait_for(lambda: num_steps(folder) > num_steps(folder) - 1 > 4)
        (pid,) = actor_pids("Coordinator")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RunFailed, match=r"line \d+ of .*journal\.jsonl does not follow the line before it"):
            run.result()
    assert "".join(heard).count("was cut or replaced") == 1
    assert left_behind("live") == []


@pytest.mark.slow
def test_a_coordinator_that_cannot_read_its_folder_ends_the_run_after_fail_after_s(local_ray, tmp_path):
    """Each of its starts is another process, which answers the driver and ends."""
    folder, gate = tmp_path / "loop", tmp_path / "gate"
    checkpoints = CheckpointConfig(fail_after_s=6.0)
    trainer = tiny_trainer(tmp_path, "loop", steps=60, gate=gate, run={"checkpoint_config": checkpoints}, **ALONE)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(trainer.fit)
        wait_for(lambda: num_steps(folder) > 2)
        path = folder / "journal.jsonl"
        path.rename(folder / "journal.old")
        path.symlink_to("journal.jsonl")
        (pid,) = actor_pids("Coordinator")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RunFailed, match=r"OSError: .*symbolic links"):
            run.result()
    assert left_behind("loop") == []


@pytest.mark.slow
def test_a_driver_gets_each_line_once_though_the_coordinator_is_killed(local_ray, tmp_path, capsys):
    faults = "kill@step=2,rank=1; kill-coordinator@step=5; kill@step=8,rank=1"
    trainer = tiny_trainer(tmp_path, "lines", steps=14, slow_s=0.3, faults=faults, dp=2, cp=1, spares=1)
    summary = finished(trainer).summary
    lines = capsys.readouterr().err.splitlines()
    told = [line for line in lines if "rank 1 died" in line]
    assert len(summary["recoveries"]) == 3
    assert len(told) == 2, "one before the restart, which hid as many after it"
