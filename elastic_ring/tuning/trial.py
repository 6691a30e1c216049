"""A trial: the user's own run under one pattern, in one process, as a `Trainable` of Ray Tune.

    trainable = pattern_trainable(ElasticRingTrainer(...))
    ray.tune.Tuner(trainable, param_space={"pattern": "sinks:64+window:{w}", "w": tune.choice([512, 1024])}, ...).fit()

It takes the steps of `train` on one rank: same model, data, order of samples, held-out sequences and optimizer. A
result is a `TrialResult`, its `pattern` a text for `--pattern`. Which patterns are tried is decided elsewhere.
"""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from ray import tune as ray_tune

from elastic_ring.config import environment
from elastic_ring.control.messages import SnapshotId
from elastic_ring.data.loader import Loader
from elastic_ring.data.sampling.validation import ValidationSource, open_sets
from elastic_ring.data.source import hold_out, open_source, order_of
from elastic_ring.errors import ElasticRingError, RunFailed
from elastic_ring.files import plain_json, read_small
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.driver.cluster import worker_environment
from elastic_ring.runtime.gpu.device import DeviceLease, be_deterministic, kernel_cache, newcomer_bytes
from elastic_ring.runtime.groups.groups import Connector, Rendezvous, forget_groups
from elastic_ring.runtime.groups.transport import LOOPBACK, RendezvousStore
from elastic_ring.state import snapshot
from elastic_ring.train.passes import validate
from elastic_ring.train.startup.check import check_pattern
from elastic_ring.train.startup.layouts import attention_shapes
from elastic_ring.train.startup.warm import warm_up_device
from elastic_ring.train.transaction import Transaction, TransactionOptions
from elastic_ring.train.wrap import num_parameters
from elastic_ring.tuning.mesh_trial import CPUS, MeshTrial
from elastic_ring.tuning.report import NUM_REPORTS, TrialResult, trial_result
from elastic_ring.tuning.space import PatternCost, PatternCosts, SearchTask, Value

if TYPE_CHECKING:
    from elastic_ring.trainer import ElasticRingTrainer

log = logging.getLogger(__name__)

NUM_COLD_STEPS = 2
"""The first steps of a pattern in a process compile kernels, so their times do not count."""
SAVE_SHARE, SAVE_BYTES_PER_S = 10.0, 5e8
"""A checkpoint is taken where it costs a tenth of the training since the last one, to a disk of that speed."""
MEMBERSHIP, MESH, WAIT_S = (1, 1), Mesh(1, 1), 60.0
SHARD, PROGRESS = "shard", "found.json"


def pattern_trainable(trainer: ElasticRingTrainer, num_cpus: float = 1.0, runs: str = "") -> Any:
    """A `Trainable` for `ray.tune.Tuner` whose trials train as `trainer` would on one device: a GPU, or `num_cpus`.

    With `runs`, a folder or `s3://bucket/prefix`, each trial is a run on the trainer's mesh that is kept there.
    Its config has `pattern`, with other axes that the text names in braces, or `family`, `density`, `block` and
    `layers`; `seed` is optional. Bytes are those of a ring of the trainer's `cp`. Trials hold out sequences also where
    the trainer does not validate.
    """
    task = trainer.task
    if not task.step.validates:
        task = replace(task, step=replace(task.step, val_every_steps=task.step.steps))
    search = SearchTask(task, trainer.scaling_config, os.getcwd())
    if runs:
        trainable = ray_tune.with_parameters(MeshTrial, trainer=trainer, search=search, runs=runs)
        return ray_tune.with_resources(trainable, {"cpu": CPUS})
    need = {"cpu": num_cpus, "gpu": 1.0 if trainer.scaling_config.device == "cuda" else 0.0}
    return ray_tune.with_resources(ray_tune.with_parameters(PatternTrial, search=search), need)


@dataclass
class _Progress:
    """A trial's progress. `times`: of this process's steps; `num_saved` of them are in a checkpoint."""

    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    earlier_times: Sequence[float] = ()
    num_saved: int = 0
    rejected: str = ""


class PatternTrial(ray_tune.Trainable):
    """One pattern; a `step` trains to the next of `NUM_REPORTS` reports. Actors are reused: imports, connections and
    compiled kernels serve the next trial."""

    def setup(self, config: Mapping[str, Value], search: SearchTask | None = None) -> None:
        assert search is not None
        self._search, scaling = search, search.scaling
        cuda = scaling.device == "cuda"
        environment().update(worker_environment(scaling.device, {}, environment(), {}))  # before CUDA begins
        torch.set_num_threads(scaling.num_threads)
        self._lease = DeviceLease(scaling.device, "tune", state_bytes=newcomer_bytes(scaling.cpu_offload))
        self._device = self._lease.take(0, num_parameters(search.task), WAIT_S, lambda: None)  # no run computes on it
        if cuda:
            torch.cuda.set_device(self._device)
        self._stream = torch.cuda.Stream(self._device) if cuda else None
        self._store = RendezvousStore(LOOPBACK)
        where = Rendezvous(LOOPBACK, self._store.port, "tune", LOOPBACK, WAIT_S, 10 * WAIT_S, self._store.secret)
        self._groups = Connector(where, self._device).connect(MESH, 0)
        self._costs = PatternCosts(search.task, scaling.cp, scaling.device)
        self._state: Transaction | None = None
        self._begin(config)

    def reset_config(self, new_config: Mapping[str, Value]) -> bool:
        self._begin(new_config)
        return True

    def _begin(self, config: Mapping[str, Value]) -> None:
        self._leave()
        if os.path.isdir(self._search.folder):
            os.chdir(self._search.folder)
        self._progress, self._cost = _Progress(), PatternCost(1.0, 0)
        self._text, self._task = self._search.trial(config, self._costs.num_layers)
        try:
            self._cost = self._costs.cost(self._text)
            if self._device.type == "cuda":
                check_pattern(self._task, MESH.cp)
            self._state = self._build()
        except (ValueError, ElasticRingError, torch.OutOfMemoryError) as error:
            self._reject(error)

    def _build(self) -> Transaction:
        """The state at its initial values. Raises RunFailed for a kernel of this pattern that is wrong here, as in a
        worker's warm-up."""
        task, kernels = self._task, dict[str, str]()
        be_deterministic(task)
        cache = kernel_cache() if self._device.type == "cuda" else None
        wrong = warm_up_device(task, self._device, attention_shapes(task), MESH.cp, cache, kernels, first_group=False)
        log.info("%s: %s", self._text, "; ".join(f"{use}: {name}" for use, name in kernels.items()))
        if wrong:
            raise RunFailed(f"{self._device}: {wrong}")
        training, held = hold_out(open_source(task.data), num_sequences=task.num_held_out)
        sets = {name: source for name, (source, _) in open_sets(task.validation).items()}
        self._validation = ValidationSource(task.validation, held, sets)
        order = order_of(training, task.step.seed, task.step.global_batch)
        loader = Loader(training, num_ahead=task.step.micro_batch)
        self._val_loader = Loader(self._validation, num_ahead=1)
        options = TransactionOptions(kernel_cache=cache, cpu_offload=self._search.scaling.cpu_offload)
        state = Transaction(task, loader, order, lambda *_: None, options)
        state.use(self._device)
        state.enter(self._groups, MEMBERSHIP, keep=False)
        state.initialise()
        return state

    def _reject(self, error: Exception) -> None:
        self._progress.rejected, self._progress.losses = f"{type(error).__name__}: {error}", []
        self._leave()

    def step(self) -> TrialResult:
        progress, steps = self._progress, self._task.step.steps
        try:
            if self._state is not None:
                self._train(self._state, steps * (len(progress.losses) + 1) // NUM_REPORTS)
        except (ElasticRingError, torch.OutOfMemoryError) as error:
            self._reject(error)
        done = bool(progress.rejected) or len(progress.losses) == NUM_REPORTS
        times, losses = progress.times or progress.earlier_times, list(progress.losses)
        step_s, applied = statistics.median(times) if times else None, 0 if self._state is None else self._state.applied
        is_worth_saving = False
        if self._state is not None and not done:
            assert self._state.shard is not None
            trained_s = sum(progress.times[progress.num_saved :])
            is_worth_saving = trained_s > SAVE_SHARE * snapshot.size_of(self._state.shard) / SAVE_BYTES_PER_S
        result = trial_result(self._text, self._task, self._cost, losses, step_s, applied, progress.rejected)
        return result | {"should_checkpoint": is_worth_saving, "done": done}

    def _train(self, state: Transaction, until: int) -> None:
        times = []
        while state.applied < until:
            begun = time.monotonic()
            state.run(state.applied, boundary=False)
            times.append(time.monotonic() - begun)
        self._progress.times += times if self._progress.times else times[NUM_COLD_STEPS:] or times
        loss = validate(state, self._val_loader, self._validation)["val_loss"]
        if not math.isfinite(loss):
            raise ElasticRingError(f"diverged: val_loss is {loss} after {until} steps")
        self._progress.losses.append(loss)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        assert self._state is not None
        assert self._state.shard is not None
        shard = snapshot.take(self._state.shard, MEMBERSHIP, snapshot.Buffers(), self._stream)
        shard.finish()
        shard.data.numpy().tofile(Path(checkpoint_dir, SHARD))
        progress = self._progress
        progress.num_saved = len(progress.times)
        times = [*progress.earlier_times, *progress.times]
        saved = {"applied": self._state.applied, "losses": progress.losses, "times": times}
        Path(checkpoint_dir, PROGRESS).write_text(json.dumps(saved), encoding="utf-8")

    def load_checkpoint(self, checkpoint: Any) -> None:
        assert self._state is not None
        assert self._state.shard is not None
        saved = plain_json(read_small(Path(checkpoint, PROGRESS)))
        data = torch.from_numpy(np.fromfile(Path(checkpoint, SHARD), dtype=np.uint8))
        with self._state.filling():
            snapshot_id = SnapshotId(saved["applied"], MEMBERSHIP)
            snapshot.load(data, snapshot_id, 0, self._state.shard, f"the checkpoint of {self._text}")
        self._progress = _Progress(saved["losses"], earlier_times=saved["times"])

    def cleanup(self) -> None:
        self._leave()
        self._groups.connector.abort()
        self._groups.connector.close()
        forget_groups()

    def _leave(self) -> None:
        if self._state is not None:
            self._state.drop()
            self._state.loader.close()
            self._val_loader.close()
        self._state = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
