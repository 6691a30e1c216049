"""Detectors that act: planted faults are found, named and answered, in a run of real processes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic_ring.config import CheckpointConfig
from elastic_ring.control.decisions.loss_spikes import Action
from elastic_ring.data.packing import BYTE_VOCAB_SIZE, Sample
from elastic_ring.data.sampling.order import sample_ids
from elastic_ring.data.sampling.validation import ValidationSet
from elastic_ring.errors import LossSpike
from elastic_ring.integrations.trackers import EarlyStopping, TensorBoard
from elastic_ring.monitor.metrics import read_metrics
from elastic_ring.monitor.page import page_data
from elastic_ring.runtime.driver.cluster import left_behind
from tests.ray.conftest import Heard, bits, finished, notes, tiny_trainer

STEPS, POISONED, BATCH, NUM_SEQUENCES = 90, 80, 4, 2000
OF_POISONED = frozenset(sample_ids(0, POISONED, BATCH, NUM_SEQUENCES))


@dataclass(frozen=True)
class CountingText:
    """Sequences that count upwards, and one batch of noise."""

    context_tokens: int = 96
    vocab_size: int = BYTE_VOCAB_SIZE
    num_sequences: int = NUM_SEQUENCES
    fingerprint: str = "counting"

    def open(self) -> CountingText:
        return self

    def read(self, sample_id: int) -> Sample:
        tokens = (np.arange(self.context_tokens + 1) + sample_id) % 16
        if sample_id in OF_POISONED:
            tokens = np.random.default_rng(sample_id).integers(0, 256, self.context_tokens + 1)
        return Sample(tokens=tokens.astype(np.int64), document_starts=(0,), ends_document=True)


def train_on_noise(
    folder: Path, name: str, actions: tuple[Action, ...], run: dict[str, Any] | None = None, **options: Any
) -> tuple[Any, Path]:
    """The summary of a run that acts on loss spikes, and its folder."""
    options = {"cp": 1, "spares": 0, **options}
    settings = {"loss_spike": "act", "loss_spike_actions": actions, **(run or {})}
    data = CountingText()
    result = finished(tiny_trainer(folder, name, steps=STEPS, global_batch=BATCH, data=data, run=settings, **options))
    return result.summary, result.path


@pytest.mark.soak
def test_a_poisoned_batch_is_skipped_alike_on_all_ranks_and_told(local_ray, tmp_path):
    summary, folder = train_on_noise(tmp_path, "poisoned", ("skip",))
    assert [line["step"] for line in read_metrics(folder) if line["skipped"]] == [POISONED]
    assert summary["skipped_steps"] == 1
    losses = [float.fromhex(loss) for loss in summary["losses"]]
    assert losses[POISONED] > 3.0 > 10 * losses[POISONED + 1]
    [note] = notes(folder, "spike")
    assert (note["step"], note["verdict"]) == (POISONED, "skip")
    assert f"its sequences are {', '.join(map(str, sample_ids(0, POISONED, BATCH, NUM_SEQUENCES)))}" in note["told"]
    # The replacement of a rank that dies shortly before has seen few losses, and yet does what the others do.
    disturbed, _ = train_on_noise(tmp_path, "poisoned-2", ("skip",), spares=1, faults="kill@step=70,rank=1")
    assert disturbed["recoveries"][0]["exact"]
    assert bits(disturbed) == bits(summary)


@pytest.mark.soak
def test_a_poisoned_batch_may_end_the_run_and_is_named(local_ray, tmp_path):
    shown = ", ".join(map(str, sample_ids(0, POISONED, BATCH, NUM_SEQUENCES)))
    with pytest.raises(LossSpike, match=rf"step {POISONED}: the loss is .* Look at its sequences \({shown}\)"):
        train_on_noise(tmp_path, "stopped", ("stop",))
    assert left_behind("stopped") == []


@dataclass(frozen=True)
class Views:
    """The callbacks of a run whose validations take place beside its training data, and what they make of it."""

    heard: Heard = field(default_factory=Heard)
    stopping: EarlyStopping = field(default_factory=lambda: EarlyStopping(patience=100))
    board: TensorBoard = field(default_factory=TensorBoard)

    def settings(self) -> dict[str, Any]:
        callbacks = self.heard, self.stopping, self.board
        validation = {"own": ValidationSet(CountingText(), num_sequences=4)}
        return {"callbacks": callbacks, "validation": validation, "val_every_steps": 5}

    def compare(self, folder: Path) -> dict[str, Any]:
        reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        shown = reader.EventAccumulator(str(folder / "tensorboard")).Reload()
        return {
            "told": (self.heard.losses, self.heard.validations),
            "state": self.stopping.state,
            "board": [[(p.step, p.value) for p in shown.Scalars(name)] for name in ("train/loss", "val/loss")],
            "lines": [(line["loss_hex"], line.get("val_loss")) for line in read_metrics(folder)],
            "page": [page_data(folder)[name] for name in ("loss", "validation", "lr", "grad_norm")],
        }


@pytest.mark.slow
def test_a_run_goes_back_to_before_a_poisoned_batch_and_a_run_that_leaves_the_same_out_has_its_bits(
    local_ray, tmp_path
):
    """And every reader of its records sees what it sees of the other run."""
    stored, views, calm = {"checkpoint_config": CheckpointConfig(every_steps=20)}, Views(), Views()
    summary, folder = train_on_noise(tmp_path, "back", ("back",), stored, **views.settings())
    [spike] = notes(folder, "spike")
    assert (spike["step"], spike["verdict"]) == (POISONED, "back")
    [left_out] = notes(folder, "left out")
    assert (left_out["step"], left_out["num_batches"]) == (60, 21)
    named = [sample for step in range(60, 81) for sample in sample_ids(0, step, BATCH, NUM_SEQUENCES)]
    assert left_out["sequences"] == named, "the sequences that no step uses"
    [change] = summary["recoveries"]
    assert change["steps_undone"] == 21
    losses = [float.fromhex(loss) for loss in summary["losses"]]
    assert len(losses) == STEPS
    assert max(losses[60:]) < 1.0, "none of them has noise"
    # The same batches from the beginning, in a run that never saw the noise.
    skips = {**stored, "skip_batches": ("60+21",)}
    again, other = train_on_noise(tmp_path, "back-again", ("stop",), skips, **calm.settings())
    assert bits(again) == bits(summary)
    assert again["validation"] == summary["validation"]
    undone = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len([line for line in undone if "val_loss" in line and "loss_hex" not in line]) == 22, "4 come twice"
    assert views.compare(folder) == calm.compare(other)


@pytest.mark.slow
def test_a_slow_worker_is_found_told_and_replaced_by_a_spare_at_a_boundary(local_ray, tmp_path):
    # A machine that is busy with other tests slows every rank now and then, but none twice as much as the others for
    # long; and it hides the slow one for some windows.
    steps = 80
    calm = tiny_trainer(tmp_path, "steady", cp=1, steps=steps, spares=0).fit()
    acting = {"straggler": "act", "straggler_window_s": 2.0, "straggler_factor": 2.0}
    result = finished(tiny_trainer(tmp_path, "slow", cp=1, steps=steps, faults="slow@step=5,rank=1", run=acting))
    [straggler] = notes(result.path, "straggler")
    assert straggler["rank"] == 1
    assert straggler["ratio"] > 2.0
    [change] = result.summary["recoveries"]
    assert (change["action"], change["exact"], change["steps_rerun"]) == ("drained", True, 0)
    assert bits(result.summary) == bits(calm.summary)
    step_s = [line["step_s"] for line in read_metrics(result.path)]
    assert min(step_s[6 : straggler["step"]]) > max(sorted(step_s[-10:])[:5]), "no step waits for it any more"


@pytest.mark.slow
def test_a_flipped_bit_in_a_gradient_is_found_its_rank_named_replaced_and_the_bits_are_those_of_no_fault(
    local_ray, tmp_path
):
    steps, checking = 12, {"corruption": "act", "corruption_every_steps": 4}
    calm = tiny_trainer(tmp_path, "right", steps=steps, spares=0, run=checking).fit()
    assert calm.summary["recoveries"] == [], "healthy ranks agree"
    flip = "flip@step=7,phase=backward,rank=3"
    result = finished(tiny_trainer(tmp_path, "wrong", steps=steps, spares=1, faults=flip, run=checking))
    first, second = notes(result.path, "wrong")
    assert (len(first["workers"]), len(second["workers"])) == (0, 1), "a second attempt tells who"
    assert "step 7: the local gradient" in first["told"]
    assert "wrong is rank 3" in second["told"]
    assert result.summary["lost_workers"] == {"computed wrongly": 1}
    assert all(recovery["exact"] for recovery in result.summary["recoveries"])
    assert bits(result.summary) == bits(calm.summary)
