"""Each committed step has one point in a tracker's store, over drivers, a killed one among them, and a server away."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from elastic_ring.integrations.trackers import MLflow, TensorBoard, Tracker, WandB, _points_of
from elastic_ring.mesh import Mesh
from elastic_ring.monitor.callbacks import STOPPED_BY_USER, CallbackDelivery, RunInfo, check_callbacks
from elastic_ring.monitor.journal import Journal
from elastic_ring.monitor.json_files import json_bytes
from elastic_ring.monitor.metrics import JOURNAL_NAME, STATUS_NAME, SUMMARY_NAME, StepMetrics
from elastic_ring.monitor.metrics_log import MetricsLog

ROOT = Path(__file__).resolve().parents[3]
CONFIG = {"optim": {"peak_lr": 0.25, "betas": [0.9, 0.95]}, "data": {"source": "StdlibText"}, "digest": "ab"}


class Records:
    """A run's folder as its coordinator writes it."""

    def __init__(self, folder: Path) -> None:
        self.metrics = MetricsLog(folder).open()
        self.journal = Journal(folder / JOURNAL_NAME, durable=False).open()

    def steps(self, *numbers: int) -> None:
        for number in numbers:
            self.metrics.record(
                StepMetrics(
                    number,
                    5.0 - number,
                    1.0,
                    0.01 * number,
                    64,
                    640.0,
                    0.1,
                    False,
                    1,
                    Mesh(2, 2),
                    4,
                )
            )

    def others(self) -> None:
        self.metrics.validated(1, {"val_loss": 4.5, "val_accuracy": 0.5})
        for total_s in (0.7, 0.8):  # two of the same step
            recovery = {"step": 2, "cause": "rank 3 died", "total_s": total_s, "detect_s": 0.1, "steps_undone": 0}
            self.journal.append({"note": "recovery", "recovery": recovery, "closes": True})
        checkpoint = {"step": 2, "path": "somewhere", "bytes": 100, "total_s": 0.5}
        self.journal.append({"note": "checkpoint", "checkpoint": checkpoint})


def tell(folder: Path, tracker: Tracker) -> None:
    """One driver from its beginning to its end."""
    with CallbackDelivery([tracker], RunInfo("tracked", folder, CONFIG)) as driver:
        driver.deliver()


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from elastic_ring.integrations import trackers
    from tests.unit.integrations.test_trackers import tell

    def killed(self, step, values, write=getattr(trackers, sys.argv[2]).write):
        write(self, step, values)
        if step == 2 and "train/loss" in values:
            os.kill(os.getpid(), signal.SIGKILL)  # the store has it, the record of what was told has not

    getattr(trackers, sys.argv[2]).write = killed
    tell(Path(sys.argv[1]), getattr(trackers, sys.argv[2])(*sys.argv[3:]))
"""


def told_by_three_drivers(folder: Path, tracker: type[Tracker], *arguments: str) -> None:
    """Steps 0 to 5, a validation, recoveries and a checkpoint; the first driver is killed within step 2."""
    records = Records(folder)
    records.steps(0, 1, 2, 3)
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(folder), tracker.__name__, *arguments]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    tell(folder, tracker(*arguments))
    records.steps(4, 5)
    records.others()
    tell(folder, tracker(*arguments))
    tell(folder, tracker(*arguments))


EXPECTED = {
    "train/loss": [(step, 5.0 - step) for step in range(6)],
    "train/lr": [(step, 0.01 * step) for step in range(6)],
    "mesh/members": [(step, 4.0) for step in range(6)],
    "val/loss": [(1, 4.5)],
    "val/accuracy": [(1, 0.5)],
    "recovery/total_s": [(2, 0.7), (2, 0.8)],
    "checkpoint/bytes": [(2, 100.0)],
}


def assert_each_once(found: dict[str, list[tuple[int, float]]]) -> None:
    for name, points in EXPECTED.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points], name
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in points], rel=1e-6), name


@pytest.mark.slow
def test_tensorboard_has_each_event_once(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    told_by_three_drivers(tmp_path, TensorBoard)
    found = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert_each_once({name: [(p.step, p.value) for p in found.Scalars(name)] for name in EXPECTED})


def back_on_another_branch(folder: Path, tracker: type[Tracker], *arguments: str) -> None:
    """Steps 0 to 4 with a validation, a checkpoint and recoveries, then from step 1 on others with another driver."""
    records = Records(folder)
    records.steps(0, 1, 2, 3, 4)
    records.others()
    tell(folder, tracker(*arguments))
    records.metrics.go_back(1, (1, 2))
    for number in (1, 2):
        metrics = StepMetrics(number, 9.0, 1.0, 0.01 * number, 64, 640.0, 0.1, False, 2, Mesh(2, 2), 4)
        records.metrics.record(metrics)
        records.metrics.validated(1, {"val_loss": 6.5, "val_accuracy": 0.25})
        tell(folder, tracker(*arguments))


def test_tensorboard_has_no_point_of_a_branch_that_does_not_count(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    back_on_another_branch(tmp_path, TensorBoard)
    found = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = {name: [(p.step, p.value) for p in found.Scalars(name)] for name in ("train/loss", "val/loss")}
    assert points == {"train/loss": [(0, 5.0), (1, 9.0), (2, 9.0)], "val/loss": [(1, 6.5)]}
    again = TensorBoard()
    assert again.open(RunInfo("tracked", tmp_path))["train/loss"] == points["train/loss"], "as the tracker reads it"
    again.on_end()


def test_mlflow_which_forgets_nothing_has_the_branch_that_counts_as_the_newer_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri, run = (tmp_path / "store").as_uri(), tmp_path / "run"
    run.mkdir()
    back_on_another_branch(run, MLflow, uri)
    client = mlflow.MlflowClient(tracking_uri=uri)
    (found,) = client.search_runs([client.get_experiment_by_name("elastic_ring").experiment_id])
    history = sorted(client.get_metric_history(found.info.run_id, "train/loss"), key=lambda point: point.timestamp)
    newest = {point.step: point.value for point in history}
    assert newest == {0: 5.0, 1: 9.0, 2: 9.0, 3: 2.0, 4: 1.0}
    assert len(history) == 7
    (branch,) = client.get_metric_history(found.info.run_id, "branch/number")
    assert (branch.step, branch.value) == (1, 1.0)
    counts = [(point.step, point.value) for point in history if point.step < 1 or point.timestamp >= branch.timestamp]
    assert counts == [(0, 5.0), (1, 9.0), (2, 9.0)]


def test_tensorboard_goes_on_after_a_file_that_was_cut_off(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.steps(0, 1)
    tell(tmp_path, TensorBoard())
    (path,) = (tmp_path / "tensorboard").glob("*.tfevents.*")
    path.write_bytes(path.read_bytes()[:-7])  # the end of step 1
    (tmp_path / "callbacks.json").unlink()  # and nobody knows what was told
    tracker = TensorBoard()
    tell(tmp_path, tracker)
    assert {step: len(values) for step, values in tracker._stored["train/loss"].items()} == {0: 1, 1: 1}
    paths = sorted((tmp_path / "tensorboard").glob("*.tfevents.*"))
    losses = [(step, value) for path in paths for step, name, value in _points_of(path) if name == "train/loss"]
    assert sorted(losses) == [(0, 5.0), (1, 4.0)]


def records_of(path: Path) -> Iterator[bytes]:
    """The records of a `.wandb` file: a LevelDB log after a header of 7 bytes, in blocks of 32 KiB."""
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no room for a header: padding
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole one, or the last part of one
            yield whole
            whole = b""


def wait_for_end(folder: Path, proto: Any, num_runs: int) -> None:
    """wandb's own process may write on for a moment after `finish` has returned on a busy machine."""
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
        if len(files) == num_runs and all(has_ended(path, proto) for path in files):
            return
        time.sleep(0.1)
    raise AssertionError(f"these have no end: {files}")


def has_ended(path: Path, proto: Any) -> bool:
    try:
        return any(proto.Record.FromString(data).WhichOneof("record_type") == "exit" for data in records_of(path))
    except DecodeError:  # a record that is just being written
        return False


@pytest.mark.slow
def test_weights_and_biases_offline_has_each_step_once_over_drivers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    monkeypatch.setenv("WANDB_SILENT", "true")
    records = Records(tmp_path)
    records.steps(0, 1, 2)
    wandb = pytest.importorskip("wandb")

    class WithRowsOfItsOwn(WandB):
        def on_step(self, metrics: StepMetrics) -> None:
            if metrics.step < 3:
                wandb.run.log({"own": metrics.step})
            super().on_step(metrics)

    tell(tmp_path, WithRowsOfItsOwn("test", mode="offline"))
    records.steps(3, 4, 5)
    records.others()
    tell(tmp_path, WithRowsOfItsOwn("test", mode="offline"))
    wait_for_end(tmp_path, proto, num_runs=2)
    rows, numbers, ids = [], list[int](), set()
    for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        for data in records_of(path):
            record = proto.Record.FromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                numbers.append(record.history.step.num)
                rows.append(
                    {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                )
    assert numbers == list(range(len(rows))), "a sync of both files joins them"
    assert [row["own"] for row in rows if "own" in row] == [0, 1, 2], "each beside the tracker's"
    assert ids == {json.loads((tmp_path / "callbacks.json").read_text())["id"]}
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in EXPECTED}
    for row in rows:
        for name in EXPECTED.keys() & row.keys():
            kind = name.partition("/")[0]
            found[name].append((int(row["train/at_step" if kind == "mesh" else f"{kind}/at_step"]), row[name]))
    assert_each_once(found)


@contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[str]:
    """MLflow's own server over SQLite."""
    store = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--default-artifact-root", str(folder)]
    address = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    words = [sys.executable, "-m", "mlflow", "server", *address, *store]
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
    uri, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
    try:
        while True:
            try:
                with urllib.request.urlopen(f"{uri}/health", timeout=5):
                    break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, (folder / "server.log").read_text()  # noqa: PT018
                time.sleep(0.2)
        yield uri
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


@pytest.mark.soak
def test_mlflows_server_has_each_event_once_and_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("flask")  # of the whole mlflow, which has the server
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = tmp_path / "run"
    run.mkdir()
    with mlflow_server(tmp_path, port) as uri:
        told_by_three_drivers(run, MLflow, uri)
    records = Records(run)
    records.steps(6)
    tell(run, MLflow(uri))  # while the server is away
    with mlflow_server(tmp_path, port) as uri:
        (run / SUMMARY_NAME).write_text("{}")
        tell(run, MLflow(uri))
        client = mlflow.MlflowClient(tracking_uri=uri)
        (found,) = client.search_runs([client.get_experiment_by_name("elastic_ring").experiment_id])
        assert found.info.run_name == "tracked"
        assert found.info.status == "FINISHED"
        assert found.data.params["optim.peak_lr"] == "0.25"
        histories = {name: client.get_metric_history(found.info.run_id, name) for name in EXPECTED}
    points = {name: sorted((point.step, point.value) for point in history) for name, history in histories.items()}
    assert points["train/loss"].pop() == (6, -1.0)
    assert points["train/lr"].pop()[0] == points["mesh/members"].pop()[0] == 6
    assert_each_once(points)


def test_a_run_that_was_stopped_is_no_failed_one_and_each_end_has_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri, found = (tmp_path / "store").as_uri(), []
    for name, end in (("finished", ""), ("failed", "LossSpike"), ("stopped", "RunFailed"), ("failed", None)):
        run = tmp_path / name
        run.mkdir(exist_ok=True)
        (run / STATUS_NAME).unlink(missing_ok=True)
        Records(run).steps(0)
        if end is not None:
            message = STOPPED_BY_USER if name == "stopped" else "step 3"
            status = {"ended": True, "end": {"error": end, "message": message}}
            (run / STATUS_NAME).write_bytes(json_bytes(status))
        tell(run, MLflow(uri))
        client = mlflow.MlflowClient(tracking_uri=uri)
        tag = json.loads((run / "callbacks.json").read_text())["id"]
        experiment = client.get_experiment_by_name("elastic_ring").experiment_id
        (tracked,) = client.search_runs([experiment], filter_string=f"tags.`{MLflow.TAG}` = '{tag}'")
        found.append(tracked.info.status)
    assert found == ["FINISHED", "FAILED", "KILLED", "RUNNING"]


def test_a_library_that_is_missing_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match=r"tensorboardX is not installed: pip install '\.\[tracking\]'"):
        TensorBoard().open(RunInfo("tracked", tmp_path))
    monkeypatch.delitem(sys.modules, "tensorboardX")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ValueError, match="tensorboardX is not installed"):
        check_callbacks([TensorBoard()])


def test_a_store_that_mlflow_refuses_is_refused_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=rf"tracking_uri='file:{tmp_path}': MLflow refuses it: The filesystem tracking"
    ):
        check_callbacks([MLflow(f"file:{tmp_path}")])
    check_callbacks([MLflow("http://127.0.0.1:9")])
