"""What the job script tells whoever called it: one exit status for each way to end, and a name that stays the same."""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import subprocess
import sys
import tracemalloc
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from elastic_ring import trainer
from elastic_ring.cli import train
from elastic_ring.cli.endings import ENDINGS
from elastic_ring.cli.forecasts import seen
from elastic_ring.cli.settings import parse
from elastic_ring.config import RunConfig
from elastic_ring.control.decisions.terms import TermClaim, refuse_if_replaced
from elastic_ring.data.source import StdlibText
from elastic_ring.errors import CoordinatorLost, ShardLost, StorageFailed, TermLost
from elastic_ring.monitor import metrics
from elastic_ring.monitor.json_files import json_bytes
from elastic_ring.monitor.metrics import CONFIG_NAME, SUMMARY_NAME
from elastic_ring.runtime import run_storage
from elastic_ring.runtime.driver import ray_session, session, submission
from elastic_ring.runtime.driver.submission import Submission
from elastic_ring.runtime.driver.submission_rules import Coordinator
from elastic_ring.runtime.driver.task_checks import check_task
from elastic_ring.runtime.identity import describe
from elastic_ring.runtime.run_storage import check_writable
from elastic_ring.runtime.worker import env_fingerprint


def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it would be started."""
    for place in (trainer, ray_session):
        monkeypatch.setattr(place, "ray_session", lambda scaling, lease_s: pytest.fail("Ray is started"))


class Ends:
    """A trainer whose run ends at once."""

    def __init__(self, how: BaseException) -> None:
        self.how = how

    def fit(self) -> Any:
        raise self.how


def term_lost() -> TermLost:
    with pytest.raises(TermLost) as raised:
        refuse_if_replaced("run", "/folder", TermClaim(1, "own"), TermClaim(2, "another", "there"))
    return raised.value


ERRORS = {
    "setting refused": ValueError("dp=0: must be 1 or more"),
    "lost to another submission": term_lost(),
    "head or coordinator lost": CoordinatorLost("no coordinator answered"),
    "other failure": ShardLost("no holder of cp_rank 1"),
    "any before training": KeyboardInterrupt(),
    **{
        how: KeyboardInterrupt(text)
        for how, text in {
            "Ctrl-C": "stopped; nothing is left running",
            "SIGTERM, SIGHUP, SIGUSR1": "stopped, with a checkpoint of step 7; nothing is left running",
            "these, no time to save": "stopped, without a new checkpoint (timeouts.stop_save_s=2); nothing is left",
            "a second one": f"stopped at once; {session.GOES_ON}",
            "any, without a head": session.NOBODY_CLEARS,
            "any while Ray is left": "stopped while Ray was left (signal 15); the run is over",
        }.items()
    },
}
ELSEWHERE = {"all steps are done, now or before", "SIGKILL"}
"""Ends of real commands: `tests/ray/clusters/test_jobs.py`, `tests/unit/driver/test_session.py`."""


@pytest.mark.parametrize(
    "ending", [ending for ending in ENDINGS if ending.how not in ELSEWHERE], ids=lambda row: row.how
)
def test_each_end_has_its_exit_status_and_its_line_of_the_page(ending, monkeypatch, capsys):
    monkeypatch.setattr(train, "_model", lambda asked: None)
    monkeypatch.setattr(train, "build", lambda asked, made: Ends(ERRORS[ending.how]))
    monkeypatch.setattr(ray_session, "ray_session", lambda scaling, lease_s: nullcontext())
    assert train.main([]) == ending.status
    begins = ending.begins
    values = {"SETTING=VALUE": "dp=0", "CLASS": "ShardLost", "RUN in FOLDER": "run in /folder", " N;": " 7;"}
    for placeholder, value in values.items():
        begins = begins.replace(placeholder, value)
    assert capsys.readouterr().err.strip().startswith(f"elastic-ring train: {begins}")
    page = (Path(__file__).parents[3] / "docs" / "operating" / "mend.md").read_text(encoding="utf-8")
    assert f"| {ending.how} | {ending.status} |" in page


class Corpus:
    """A user's own source without a `repr`."""


@pytest.mark.slow
def test_a_users_object_has_the_same_name_in_every_process():
    parts = "Corpus(), partial(sorted, Corpus(), key=Corpus), StdlibText(8), 'text', None"
    here = [describe(part) for part in (Corpus(), partial(sorted, Corpus(), key=Corpus), StdlibText(8), "text", None)]
    program = (
        "from functools import partial\nfrom elastic_ring.data.source import StdlibText\n"
        "from elastic_ring.runtime.identity import describe\nfrom tests.unit.driver.test_train_job import Corpus\n"
        f"print([describe(part) for part in ({parts})])"
    )
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert there.stdout.strip() == str(here)
    assert not any("0x" in name for name in here)
    assert len(set(here)) == len(here)


def test_a_runs_record_names_its_versions_which_are_no_part_of_what_it_is_recognised_by(tmp_path, monkeypatch):
    made = train.build(train.parse(["--run-dir", str(tmp_path)])).submission()
    before = made.digest
    monkeypatch.setattr(env_fingerprint.torch, "__version__", "0.1")
    made.write_record()
    recorded = json.loads((tmp_path / CONFIG_NAME).read_text())
    assert recorded["versions"] == env_fingerprint.versions("cpu")
    assert recorded["versions"]["torch"] == "0.1"
    assert recorded["digest"] == made.digest == before
    monkeypatch.undo()
    assert made.finished_summary() is None, "the same run, whatever it was begun with"


STRANGERS = [
    json.dumps({"run": {"name": "train-1t-laptop"}, "digest": "", **one})
    for one in ({"identity": [1]}, {"identity": {"data": [1]}}, {"places": ["/"]}, {"files": [1]}, {"files": [["a"]]})
]


@pytest.mark.parametrize("left", ["", '{"run": ', *STRANGERS])
def test_a_record_that_is_cut_or_a_strangers_is_told_set_aside_and_written_anew(tmp_path, left, caplog):
    made = train.build(train.parse(["--run-dir", str(tmp_path)])).submission()
    (tmp_path / CONFIG_NAME).write_text(left)
    assert made.finished_summary() is None
    assert f"{tmp_path}/config.json is" in caplog.text
    made.write_record()
    assert (tmp_path / f"{CONFIG_NAME}.damaged-1").read_text() == left
    assert made.finished_summary() is None


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the driver of a job runs that was submitted with a working directory."""
    made = tmp_path / "session_2026" / "runtime_resources" / "working_dir_files" / "_ray_pkg_0123456789abcdef"
    made.mkdir(parents=True)
    monkeypatch.chdir(made)
    without_ray(monkeypatch)
    return made


def test_a_run_in_rays_copy_of_a_jobs_working_directory_is_refused_before_anything_is_looked_at(copy, capsys):
    """Nor is an earlier run's folder believed that was uploaded with the rest."""
    (copy / "runs" / "astray").mkdir(parents=True)
    (copy / "runs" / "astray" / SUMMARY_NAME).write_text(json.dumps({"losses": [(1.0).hex()]}))
    before = sorted(copy.rglob("*"))
    assert train.main(["--run-name", "astray", "--faults", "none"]) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.startswith(
        f"elastic-ring train: run_dir='{copy}/runs/astray' lies in Ray's temporary copy of a job's working"
    )
    assert sorted(copy.rglob("*")) == before


def test_a_run_dir_that_is_a_file_is_refused_before_ray_is_joined(tmp_path, monkeypatch, capsys):
    without_ray(monkeypatch)
    (tmp_path / "run").write_text("")
    assert train.main(["--run-dir", str(tmp_path / "run")]) == 2
    assert f"run_dir='{tmp_path}/run' is a file: give a folder" in capsys.readouterr().err
    assert train.main(["--run-dir", str(tmp_path / "run" / "x" / "y")]) == 2
    assert f"run/x/y' cannot be written to: {tmp_path}/run is a file; give a folder" in capsys.readouterr().err


@pytest.mark.parametrize("is_local", [True, False])
def test_a_model_folder_that_cannot_be_is_refused_before_a_cluster_is_joined(is_local, tmp_path, monkeypatch, capsys):
    without_ray(monkeypatch)
    monkeypatch.setattr(ray_session.access, "find", lambda **how: "" if is_local else "far:1")
    flags = ["--model-folder", str(tmp_path), "--dp", "1", "--cp", "1", "--run-dir", str(tmp_path / "run")]
    (tmp_path / "config.json").mkdir()
    assert train.main(flags) == 2
    assert "config.json: cannot be read" in capsys.readouterr().err
    (tmp_path / "config.json").rmdir()
    if not is_local:  # a Ray of its own is started beside the model
        (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
        assert train.main(flags) == 2
        assert "nothing" in capsys.readouterr().err


def test_a_run_trains_whose_forecast_cannot_be_made(monkeypatch):
    def away(*_: Any) -> dict[str, float]:
        raise StorageFailed("the store of the manifest is away")

    monkeypatch.setattr(seen, "planned", away)
    asked = parse([])
    trainer = SimpleNamespace(task=SimpleNamespace(step=asked.step), scaling_config=asked.scaling, gpu=None)
    assert train._planned(asked, trainer) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize("record", ["config.json", "journal.jsonl", "terms", "attempt-001"])
def test_a_folder_with_other_files_and_no_records_is_refused_and_left_as_it_is(tmp_path, record):
    check_writable(tmp_path)
    (tmp_path / "thesis.txt").write_text("")
    with pytest.raises(ValueError, match=rf"run_dir='{tmp_path}' holds other files: give a new folder"):
        check_writable(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    (tmp_path / record).mkdir()
    check_writable(tmp_path)


def test_only_a_full_disk_is_told_to_be_freed(tmp_path, monkeypatch):
    def refused(fd: int) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/a/temporary/name")

    monkeypatch.setattr(run_storage.os, "fsync", refused)
    with pytest.raises(ValueError, match=r"cannot be written to: /a/temporary/name: permission denied: / belongs to"):
        check_writable(tmp_path / "run")


def test_a_plan_may_be_asked_for_in_such_a_copy(copy, capsys):
    assert train.main(["--plan", "--data", "nosuch.txt"]) == 2
    assert "nosuch.txt: there is no such file" in capsys.readouterr().err
    assert train.main(["--plan"]) == 0
    assert "MiB" in capsys.readouterr().out
    assert list(copy.iterdir()) == []


def test_a_plan_for_gpus_says_what_the_start_would_say_of_a_pattern(capsys, caplog):
    asked = ["--plan", "--preset", "100m", "--scaling.device", "cuda", "--dp", "1", "--cp", "2", "--context", "8000"]
    assert train.main([*asked, "--pattern", "window:1000;dense@1"]) == 0
    assert "blocks of 128 tokens are cut" in caplog.text
    assert train.main([*asked, "--pattern", "topk:4,fetch_all=1"]) == 2
    assert "leave fetch_all out" in capsys.readouterr().err


# ------------------------------------------------------------ the versions of a run


class Found:
    """What the cluster would say to a submission, and what it makes of it."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, asked: Submission, coordinators: list[Any], attempt: str
    ) -> None:
        folder = asked.run.storage_uri
        answer = Coordinator("theirs", asked.digest, asked.identity, {}, folder, False, "", False)
        self.made: list[Any] = []
        actor = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self.make))
        looks = iter(coordinators)
        monkeypatch.setattr(submission, "room", lambda scaling, run: scaling.dp)
        monkeypatch.setattr(submission, "live_nodes", lambda scaling: [])
        monkeypatch.setattr(submission, "worker_environment_of", lambda run, device: run.env)
        monkeypatch.setattr(submission.ray, "remote", lambda cls: actor)
        monkeypatch.setattr(submission.attach, "find", lambda run: next(looks))
        monkeypatch.setattr(submission.attach, "ask", lambda handle, run: answer)
        monkeypatch.setattr(submission.attach, "attempt_of", lambda handle, run, starts: attempt)

    def make(self, run_spec: Any) -> str:
        self.made.append(run_spec)
        return "made"


@pytest.mark.parametrize(
    ("coordinators", "attempt", "got", "num_made"),
    [(["theirs"], "", "theirs", 0), ([None, "theirs"], "another", "theirs", 1), ([None], "mine", "made", 1)],
    ids=["one that runs", "one that was quicker", "its own"],
)
@pytest.mark.parametrize("recorded", [True, False])
def test_whoever_has_its_coordinator_hears_of_other_versions_and_only_its_maker_replaces_the_record(
    coordinators, attempt, got, num_made, recorded, tmp_path, monkeypatch, caplog
):
    asked = replace(
        train.build(train.parse(["--run-dir", str(tmp_path), "--run-name", "x"])).submission(), attempt="mine"
    )
    path = tmp_path / CONFIG_NAME
    there = {**asked.settings_record(), "versions": {"torch": "0.1"}}
    if recorded:
        path.write_bytes(json_bytes(there))
    found = Found(monkeypatch, asked, coordinators, attempt)
    assert asked.find_or_start("fingerprint") == got
    assert len(found.made) == num_made
    told = [line for line in caplog.messages if "was recorded with other versions" in line]
    assert [line.split(": ")[1].split(" ")[:3] for line in told] == [["torch", "0.1", "there,"]] * recorded
    kept = recorded and got == "theirs"
    assert json.loads(path.read_text())["versions"] == (there["versions"] if kept else env_fingerprint.versions("cpu"))


def test_the_record_of_a_run_survives_a_power_cut(tmp_path, monkeypatch):
    """As its journal does: what is not flushed before it gets its name may be an empty file afterwards."""
    flushed, flush = list[str](), os.fsync

    def fsync(fd: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{fd}").resolve().name)
        flush(fd)

    monkeypatch.setattr(metrics.os, "fsync", fsync)
    train.build(train.parse(["--run-dir", str(tmp_path / "run")])).submission().write_record()
    assert [name.startswith(f".{CONFIG_NAME}.") for name in flushed] == [True, False]
    assert flushed[1] == "run"


def test_a_restored_trainer_goes_on_in_its_run_or_begins_at_exactly_the_checkpoint_that_is_named(tmp_path):
    model: Any = partial(dict)
    restore = partial(trainer.ElasticRingTrainer.restore, model=model, data=StdlibText(2048))
    run = restore(f"{tmp_path}/runs/mine/").run_config
    assert (run.name, run.storage_path, run.resume) == ("mine", f"{tmp_path}/runs", "auto")
    named = "s3://bucket/runs/mine/checkpoints/step-00000100/lineage-000"
    run = restore(named).run_config
    assert (run.storage_uri, run.resume) == ("s3://bucket/runs/mine", named), "another lineage may have the step, too"
    run = restore(named, run_config=RunConfig("other")).run_config
    assert (run.name, run.resume) == ("other", named)


def test_a_module_that_workers_would_not_find_is_refused_by_name_before_ray_starts(tmp_path, monkeypatch):
    """`sys.path` of the driver is its own: workers have the folder of its script, and its working directory."""
    code = "def loss(model, batch):\n    return model(batch)\nclass Loss:\n    __call__ = loss\n"
    (tmp_path / "er_elsewhere.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    elsewhere = importlib.import_module("er_elsewhere")
    notebook: dict[str, Any] = {"__name__": "__main__"}
    exec("import er_elsewhere\ndef loss(model, batch):\n    return er_elsewhere.loss(model, batch)\n", notebook)
    told = r"module 'er_elsewhere' \(.*er_elsewhere\.py\): workers could not import it: .* PYTHONPATH"
    for loss in (elsewhere.loss, elsewhere.Loss(), notebook["loss"], partial(elsewhere.loss)):
        task = replace(train.build(train.parse([])).task, loss=loss)
        with pytest.raises(ValueError, match=told):
            check_task(task, 1, "cpu")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "script.py")])
    check_task(task, 1, "cpu")


OF_A_NOTEBOOK = """
import pickle, subprocess, sys
from dataclasses import replace
import cloudpickle
from elastic_ring import Callback
from elastic_ring.cli import train
from elastic_ring.runtime.driver.task_checks import check_task

def loss(model, batch):
    return model(batch.tokens).sum(), 1

class Metric(Callback):
    def __call__(self, model, batch):
        return loss(model, batch)

own = Metric()
task = replace(train.build(train.parse(["--step.val-every-steps", "5"])).task, loss=loss, metrics={"own": own})
check_task(task, 1, "cpu")
reads = "import pickle, sys; print(*pickle.load(sys.stdin.buffer))"
sent = cloudpickle.dumps((task.loss, own, own.__call__))
print(subprocess.run([sys.executable, "-c", reads], input=sent, capture_output=True, check=True).stdout.decode())
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["script", "-c"])
def test_a_loss_a_metric_and_a_callback_of_main_go_to_workers_by_value(tmp_path, kind):
    (tmp_path / "script.py").write_text(OF_A_NOTEBOOK)
    words = [str(tmp_path / "script.py")] if kind == "script" else ["-c", OF_A_NOTEBOOK]
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=os.environ | path, capture_output=True, text=True)
    found = re.findall(r"function loss|__main__\.Metric|method Metric\.__call__", done.stdout)
    assert len({*found}) == 3, done.stderr


def test_a_module_of_the_driver_alone_is_not_looked_for_whatever_its_name(tmp_path, monkeypatch):
    for name in ("data", "validation", "model", "loss", "optim"):
        module = ModuleType(name)
        module.__file__ = str(tmp_path / f"{name}.py")
        monkeypatch.setitem(sys.modules, name, module)
    check_task(train.build(train.parse([])).task, 1, "cpu")


def test_the_check_of_a_task_keeps_no_copy_of_what_is_in_it():
    task = train.build(train.parse([])).task
    size = 1 << 26
    task = replace(task, loss=partial(task.loss, weights=bytes(size)))
    tracemalloc.start()
    try:
        check_task(task, 1, "cpu")
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()
