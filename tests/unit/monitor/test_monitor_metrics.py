"""A step is written once, bit for bit; goodput counts what stayed; the summary has exactly its keys."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from elastic_ring.control.facts import GenerationBegan
from elastic_ring.errors import JournalDamaged, RecordDamaged, RunFailed
from elastic_ring.mesh import Mesh
from elastic_ring.monitor.goodput import Goodput
from elastic_ring.monitor.json_files import read_json
from elastic_ring.monitor.metrics import RECOVERY_KEYS, Recovery, StepMetrics, Summary, read_metrics, write_json
from elastic_ring.monitor.metrics_log import MetricsLog

RECOVERY: dict[str, Any] = {
    "step": 21,
    "faults": ["kill@step=21,phase=backward,rank=3"],
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


def metrics(step: int, loss: float = 2.5, **changes: Any) -> StepMetrics:
    values: dict[str, Any] = {
        "step": step,
        "loss": loss,
        "grad_norm": 1.25,
        "lr": 3e-4,
        "num_tokens": 8192,
        "tokens_per_s": 9000.0,
        "step_s": 0.9,
        "skipped": False,
        "generation": 1,
        "mesh": Mesh(2, 2),
        "num_members": 4,
        "hop_bytes": 4096,
        "exposed_hop_wait_s": 0.01,
    }
    return StepMetrics(**{**values, **changes})


def test_a_line_holds_the_step_and_gives_it_back_bit_for_bit(tmp_path: Path) -> None:
    loss = math.nextafter(2.3, 3.0)
    with MetricsLog(tmp_path) as log:
        assert log.record(metrics(0, loss))
        assert log.record(metrics(1, loss, samples="ab", val_loss=2.25))
    line, with_validation = read_metrics(tmp_path)
    assert StepMetrics.from_json(with_validation) == metrics(1, loss, samples="ab", val_loss=2.25)
    assert line["loss_hex"] == loss.hex()
    assert line["mesh"] == {"dp": 2, "cp": 2}
    assert line["unix_s"] > 0
    assert StepMetrics.from_json(line) == metrics(0, loss)


def test_times_of_hops_that_nobody_measured_are_null_and_come_back_as_none(tmp_path: Path) -> None:
    measured = metrics(1, hop_latency_mean_s=0.002, hop_latency_p99_s=0.003)
    with MetricsLog(tmp_path) as log:
        assert log.record(metrics(0, exposed_hop_wait_s=None))
        assert log.record(measured)
    lines = read_metrics(tmp_path)
    names = ("exposed_hop_wait_s", "hop_latency_mean_s", "hop_latency_p99_s")
    assert [[line[name] for name in names] for line in lines] == [[None] * 3, [0.01, 0.002, 0.003]]
    assert StepMetrics.from_json(lines[0]) == metrics(0, exposed_hop_wait_s=None)
    assert StepMetrics.from_json(lines[1]) == measured


def test_a_validation_counts_once_and_may_come_before_its_step(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.record(metrics(0))
        log.validated(1, {"val_loss": 2.5})
        log.record(metrics(1))
    with MetricsLog(tmp_path) as log:
        log.validated(1, {"val_loss": 9.0})
        assert log.last_step == 1
        assert len(log.table.losses_hex()) == 2
    assert [line["val_loss"] for line in read_metrics(tmp_path)] == [None, 2.5]


def test_a_loss_that_is_not_finite_is_valid_json_and_comes_back(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.record(metrics(0, math.nan, grad_norm=math.inf, skipped=True))
        log.record(metrics(1, math.inf))
        assert log.table.losses_hex() == ["nan", "inf"]

    def refuse(word: str) -> None:
        raise AssertionError(word)

    text = (tmp_path / "metrics.jsonl").read_text()
    lines = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert [line["loss"] for line in lines] == [None, None]
    assert math.isnan(StepMetrics.from_json(lines[0]).loss)
    assert StepMetrics.from_json(lines[1]).loss == math.inf


def test_a_step_is_written_once_also_across_a_restart(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        assert log.last_step == -1
        written = [log.record(metrics(step, step / 3)) for step in (0, 1, 1, 2, 0)]
        assert written == [True, True, False, True, False]
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step":3,"lo')  # the coordinator died here
    with MetricsLog(tmp_path) as log:
        assert log.last_step == 2
        assert [log.record(metrics(step, step / 3)) for step in (1, 2, 3)] == [False, False, True]
        assert log.table.losses_hex() == [(step / 3).hex() for step in range(4)]
        assert log.table.rows.values("step_s") == [0.9] * 4
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2, 3]


def test_another_loss_for_a_published_step_is_refused(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.record(metrics(4, 1.0))
        with pytest.raises(RunFailed, match="step 4 was published"):
            log.record(metrics(4, math.nextafter(1.0, 2.0)))


def test_a_step_that_was_never_reported_is_named(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        for step in (0, 1, 3):
            log.record(metrics(step))
        with pytest.raises(RunFailed, match="no line for step 2"):
            log.table.losses_hex()


def test_damaged_metrics_are_not_taken_for_shorter_ones(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        for step in range(3):
            log.record(metrics(step))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"step":1', b'"step:1'))
    with pytest.raises(JournalDamaged, match="line 2"):
        MetricsLog(tmp_path).open()


def test_no_file_before_open(tmp_path: Path) -> None:
    MetricsLog(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    assert read_metrics(tmp_path / "run") == []


def test_goodput_is_the_share_of_time_whose_steps_stayed_committed() -> None:
    goodput = Goodput(start_s=100.0)
    assert goodput.ratio(100.0) == 0.0
    for _ in range(8):
        goodput.committed(1.0)
    assert goodput.ratio(110.0) == pytest.approx(0.8)
    goodput.undone(3.0)
    assert goodput.ratio(110.0) == pytest.approx(0.5)
    goodput.committed(2.0)  # only the attempt that stayed counts
    assert goodput.ratio(120.0) == pytest.approx(7 / 20)
    again = Goodput(100.0, 5.0)
    again.committed(2.0)
    assert again.ratio(120.0) == goodput.ratio(120.0)
    assert goodput.ratio(101.0) == 1.0


def summary(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "steps": 2,
        "planned_steps": 2,
        "losses": [(2.0).hex(), (1.5).hex()],
        "weights_sha256": "aa",
        "samples_sha256": "bb",
        "goodput": 0.9,
        "exact": True,
        "recoveries": [Recovery(**RECOVERY, kind="died", broken_off_s=0.1)],
        "generations": [GenerationBegan(1, 1, {"dp": 2, "cp": 2}, "formed")],
    }
    return Summary(**{**values, **changes}).to_json()


def test_the_summary_has_exactly_the_promised_keys(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, summary())
    content = json.loads(path.read_text())
    assert list(content) == [
        "steps",
        "losses",
        "weights_sha256",
        "samples_sha256",
        "goodput",
        "exact",
        "mesh_changed",
        "generations",
        "recoveries",
        "compilations_after_step_0",
        "skipped_steps",
        "lost_workers",
        "resumed_from",
        "checkpoints",
        "memory",
        "peak_gpu_bytes",
        "time_s",
        "identity",
        "stopped",
        "planned_steps",
        "validation",
        "format",
        "sha256",
    ]
    assert content["steps"] == 2
    assert [float.fromhex(loss) for loss in content["losses"]] == [2.0, 1.5]
    assert list(content["generations"][0]) == ["term", "generation", "mesh", "reason"]
    assert content["recoveries"] == [RECOVERY]
    assert list(content["recoveries"][0]) == list(RECOVERY_KEYS)


def test_a_run_whose_mesh_changed_says_so_and_promises_nothing_of_its_bits() -> None:
    generations = [GenerationBegan(1, 1, {"dp": 2, "cp": 2}, ""), GenerationBegan(1, 2, {"dp": 1, "cp": 2}, "")]
    undisturbed = summary()
    assert (undisturbed["exact"], undisturbed["mesh_changed"]) == (True, False)
    shrank = summary(exact=False, generations=generations)
    assert (shrank["exact"], shrank["mesh_changed"]) == (None, True), "its bits may be equal all the same"


@pytest.mark.parametrize("damage", [{"heal_s": "?"}, {"exact": 1}, {"faults": "kill"}, {"lost": []}])
def test_a_recovery_that_lacks_a_field_or_has_one_of_another_type_is_refused(damage: dict[str, Any]) -> None:
    assert Recovery.from_json(RECOVERY).to_json() == {**Recovery(**RECOVERY).to_json()}
    (name,) = damage
    with pytest.raises(TypeError, match=name):
        Recovery.from_json({**RECOVERY, **damage})
    with pytest.raises(TypeError, match="heal_s"):
        Recovery.from_json({key: value for key, value in RECOVERY.items() if key != "heal_s"})


def test_a_json_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_json(path, {"n": 1})
    old = path.open()
    write_json(path, {"n": 2}, durable=True)
    with old:
        assert json.load(old)["n"] == 1
    assert read_json(path) == {"n": 2}
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"n": math.nan})
    assert read_json(path) == {"n": 2}
    path.write_bytes(path.read_bytes().replace(b"2", b"3", 1))
    with pytest.raises(RecordDamaged, match=r"status\.json is not what was written"):
        read_json(path)
    path.write_text('{"sha256": ""}')
    with pytest.raises(RecordDamaged, match="another digest"):
        read_json(path)
    assert [item.name for item in tmp_path.iterdir()] == ["status.json"]
