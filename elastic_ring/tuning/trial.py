"""A trial: the user's own run under one pattern, in one process, as a `Trainable` of Ray Tune.

    trainable = pattern_trainable(ElasticRingTrainer(...))
    ray.tune.Tuner(trainable, param_space={"pattern": "sinks:64+window:{w}", "w": tune.choice([512, 1024])}, ...).fit()

It takes the steps of `train` on one rank: same model, data, order of samples, held-out sequences and optimizer. A
result has `loss`, `step_s`, `bytes`, `density`, `tokens`, `losses` at each report so far, `pattern` as `--pattern`
takes it, and `rejected`: why a pattern cannot be trained. Which patterns are tried is decided elsewhere.
"""

from __future__ import annotations

import dataclasses
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
from ray.tune.result import SHOULD_CHECKPOINT
from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.config import ScalingConfig, environment
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
from elastic_ring.runtime.groups.sockets import LOOPBACK, RendezvousStore
from elastic_ring.state import snapshot
from elastic_ring.train.startup.check_pattern import check_pattern
from elastic_ring.train.startup.warm import attention_shapes, warm_up_device
from elastic_ring.train.task import TrainingTask
from elastic_ring.train.transaction import Transaction, TransactionOptions
from elastic_ring.train.wrap import num_parameters
from elastic_ring.tuning.cost import Costs
from elastic_ring.tuning.pareto import is_behind
from elastic_ring.tuning.space import DENSE, pattern_of

if TYPE_CHECKING:
    from elastic_ring.trainer import ElasticRingTrainer

log = logging.getLogger(__name__)

METRICS = ("loss", "step_s", "bytes")
NUM_REPORTS = 4
NUM_COLD_STEPS = 2
"""Of a pattern in a process: kernels are compiled there, and no time counts."""
SAVE_SHARE, SAVE_BYTES_PER_S = 10.0, 5e8
"""A checkpoint is taken where it costs a tenth of the training since the last one, to a disk of that speed."""
REJECTED_LOSS = 1e9
"""Optuna refuses what is not finite."""
MEMBERSHIP, MESH, WAIT_S = (1, 1), Mesh(1, 1), 60.0
SHARD, FOUND = "shard", "found.json"


@dataclass(frozen=True)
class Asked:
    """What all trials of a search share."""

    task: TrainingTask
    scaling: ScalingConfig
    folder: str
    """Where the search was begun: relative paths of data count from there, and Tune gives each trial a folder."""

    def of(self, config: Mapping[str, Any], num_layers: int) -> tuple[str, TrainingTask]:
        """A trial's pattern and its task: under a seed of its own also other first values and another order."""
        task, text = self.task, pattern_of(config, self.task.step.context_tokens, num_layers)
        seed, initial = int(config.get("seed", task.step.seed)), task.initial
        if any(field.name == "seed" for field in _fields(initial)):
            initial = replace(initial, seed=seed)  # type: ignore[type-var]
        step = replace(task.step, seed=seed)
        return text, replace(task, pattern=parse_pattern(text), step=step, initial=initial)


def _fields(part: Any) -> tuple[Any, ...]:
    return dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()


def pattern_trainable(trainer: ElasticRingTrainer, num_cpus: float = 1.0, runs: str = "") -> Any:
    """A `Trainable` for `ray.tune.Tuner` whose trials train as `trainer` would on one device: a GPU, or `num_cpus`.

    With `runs`, a folder or `s3://bucket/prefix`, each trial is a run on the trainer's mesh that is kept there.
    Its config has `pattern`, with other axes that the text names in braces, or `family`, `density`, `block` and
    `layers`; `seed` is optional. Bytes are those of a ring of the trainer's `cp`. Where the trainer does not validate,
    trials hold out sequences all the same.
    """
    task = trainer.task
    if not task.step.validates:
        task = replace(task, step=replace(task.step, val_every_steps=task.step.steps))
    asked = Asked(task, trainer.scaling_config, os.getcwd())
    if runs:
        from elastic_ring.tuning.mesh_trial import CPUS, AskedRuns, MeshTrial

        shared = AskedRuns(trainer, asked, runs)
        return ray_tune.with_resources(ray_tune.with_parameters(MeshTrial, shared=shared), {"cpu": CPUS})
    need = {"cpu": num_cpus, "gpu": 1.0 if trainer.scaling_config.device == "cuda" else 0.0}
    return ray_tune.with_resources(ray_tune.with_parameters(PatternTrial, asked=asked), need)


def result_of(
    text: str,
    task: TrainingTask,
    about: Mapping[str, Any],
    losses: list[float],
    step_s: float | None,
    steps: int,
    rejected: str,
) -> dict[str, Any]:
    """What a trial reports; `about`: as `Costs.of`; without losses, and without a time, a value that loses."""
    return {
        "pattern": text,
        "seed": task.step.seed,
        "loss": losses[-1] if losses else REJECTED_LOSS,
        "losses": losses,
        "step_s": REJECTED_LOSS if step_s is None else step_s,
        **{name: about[name] for name in ("density", "bytes")},
        "tokens": task.step.global_batch * task.step.context_tokens * steps,
        "rejected": rejected,
    }


@dataclass
class _Found:
    """What a trial has come to. `times`: of this process's steps; `num_saved` of them are in a checkpoint."""

    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    earlier_times: Sequence[float] = ()
    num_saved: int = 0
    rejected: str = ""


class PatternTrial(ray_tune.Trainable):
    """One pattern; a `step` trains to the next of `NUM_REPORTS` reports. Actors are reused: what is imported, connected
    and compiled serves the next trial."""

    def setup(self, config: dict[str, Any], asked: Asked | None = None) -> None:
        assert asked is not None
        self._asked = asked
        cuda = asked.scaling.device == "cuda"
        environment().update(worker_environment(asked.scaling.device, {}, environment(), {}))  # before CUDA begins
        torch.set_num_threads(asked.scaling.num_threads)
        self._lease = DeviceLease(asked.scaling.device, "tune", state_bytes=newcomer_bytes(asked.scaling.cpu_offload))
        self._device = self._lease.take(0, num_parameters(asked.task), WAIT_S, lambda: None)  # no run computes on it
        if cuda:
            torch.cuda.set_device(self._device)
        self._stream = torch.cuda.Stream(self._device) if cuda else None
        self._store = RendezvousStore(LOOPBACK)
        where = Rendezvous(LOOPBACK, self._store.port, "tune", LOOPBACK, WAIT_S, 10 * WAIT_S, self._store.secret)
        self._groups = Connector(where, self._device).connect(MESH, 0)
        self._costs = Costs(asked.task, asked.scaling.cp, asked.scaling.device)
        self._state: Transaction | None = None
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._begin(new_config)
        return True

    def _begin(self, config: dict[str, Any]) -> None:
        self._leave()
        if os.path.isdir(self._asked.folder):
            os.chdir(self._asked.folder)
        self._found = _Found()
        self._text, self._task = self._asked.of(config, self._costs.num_layers)
        try:
            self._about = self._costs.of(self._text)
            if self._device.type == "cuda":
                check_pattern(self._task, MESH.cp)
            self._state = self._built()
        except (ValueError, ElasticRingError, torch.OutOfMemoryError) as error:
            self._reject(error)

    def _built(self) -> Transaction:
        task = self._task
        be_deterministic(task)
        cache = kernel_cache() if self._device.type == "cuda" else None
        self._test_kernels(cache)
        training, held = hold_out(open_source(task.data), num_sequences=task.num_held_out)
        opened = open_sets(task.validation)
        self._validation = ValidationSource(task.validation, held, {name: one for name, (one, _) in opened.items()})
        order = order_of(training, task.step.seed, task.step.global_batch)
        loader = Loader(training, num_ahead=task.step.micro_batch)
        self._val_loader = Loader(self._validation, num_ahead=1)
        options = TransactionOptions(kernel_cache=cache, cpu_offload=self._asked.scaling.cpu_offload)
        state = Transaction(task, loader, order, lambda *_: None, options)
        state.use(self._device)
        state.enter(self._groups, MEMBERSHIP, keep=False)
        state.initialise()
        return state

    def _test_kernels(self, cache: Path | None) -> None:
        """A worker's warm-up, for the kernels of this trial's pattern. Raises RunFailed for one that is wrong here."""
        task, kernels = self._task, dict[str, str]()
        wrong = warm_up_device(task, self._device, attention_shapes(task), MESH.cp, cache, kernels, first_group=False)
        log.info("%s: %s", self._text, "; ".join(f"{what}: {name}" for what, name in kernels.items()))
        if wrong:
            raise RunFailed(f"{self._device}: {wrong}")

    def _reject(self, error: Exception) -> None:
        self._found.rejected, self._found.losses = f"{type(error).__name__}: {error}", []
        self._leave()

    def step(self) -> dict[str, Any]:
        found, steps = self._found, self._task.step.steps
        try:
            if self._state is not None:
                self._train(steps * (len(found.losses) + 1) // NUM_REPORTS)
        except (ElasticRingError, torch.OutOfMemoryError) as error:
            self._reject(error)
        done = bool(found.rejected) or len(found.losses) == NUM_REPORTS
        about = getattr(self, "_about", {"density": 1.0, "bytes": 0})
        times, losses = found.times or found.earlier_times, list(found.losses)
        step_s = statistics.median(times) if times else None
        return result_of(self._text, self._task, about, losses, step_s, self._applied, found.rejected) | {
            SHOULD_CHECKPOINT: not done and self._is_worth_saving(),
            "done": done,
        }

    @property
    def _applied(self) -> int:
        return self._state.applied if self._state is not None else 0

    def _train(self, until: int) -> None:
        state, times = self._state, []
        assert state is not None
        while state.applied < until:
            begun = time.monotonic()
            state.run(state.applied, boundary=False)
            times.append(time.monotonic() - begun)
        self._found.times += times if self._found.times else times[NUM_COLD_STEPS:] or times
        loss = state.validate(self._val_loader, self._validation)["val_loss"]
        if not math.isfinite(loss):
            raise ElasticRingError(f"diverged: val_loss is {loss} after {until} steps")
        self._found.losses.append(loss)

    def _is_worth_saving(self) -> bool:
        """Whether the training since the last checkpoint took `SAVE_SHARE` times what one takes."""
        assert self._state is not None
        assert self._state.shard is not None
        trained_s = sum(self._found.times[self._found.num_saved :])
        return trained_s > SAVE_SHARE * snapshot.size_of(self._state.shard) / SAVE_BYTES_PER_S

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        assert self._state is not None
        assert self._state.shard is not None
        taken = snapshot.take(self._state.shard, MEMBERSHIP, snapshot.Buffers(), self._stream)
        taken.finish()
        taken.data.numpy().tofile(Path(checkpoint_dir, SHARD))
        found = self._found
        found.num_saved = len(found.times)
        saved = {"applied": self._applied, "losses": found.losses, "times": [*found.earlier_times, *found.times]}
        Path(checkpoint_dir, FOUND).write_text(json.dumps(saved), encoding="utf-8")

    def load_checkpoint(self, checkpoint: Any) -> None:
        assert self._state is not None
        assert self._state.shard is not None
        found = plain_json(read_small(Path(checkpoint, FOUND)))
        data = torch.from_numpy(np.fromfile(Path(checkpoint, SHARD), dtype=np.uint8))
        with self._state.filling():
            wanted = SnapshotId(found["applied"], MEMBERSHIP)
            snapshot.load(data, wanted, 0, self._state.shard, f"the checkpoint of {self._text}")
        self._found = _Found(found["losses"], earlier_times=found["times"])

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


class NonDominatedRank(FIFOScheduler):
    """Stops a trial that lies behind `keep` fronts of those that have come as far, once `least` have.

    Ray Tune's own schedulers take one metric. Compares with the results that Tune itself keeps of all trials, so that a
    restored search compares with earlier ones, too.
    """

    def __init__(self, keep: int = 2, least: int = 6) -> None:
        super().__init__()
        self._keep, self._least = keep, least

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        part = len(result["losses"])
        if result["rejected"] or result["done"] or result["pattern"] == DENSE:
            return str(TrialScheduler.CONTINUE)
        found = {each.trial_id: each.last_result for each in tune_controller.get_trials()} | {trial.trial_id: result}
        seen = {
            name: (one["losses"][part - 1], one["step_s"], one["bytes"])
            for name, one in found.items()
            if one and len(one.get("losses", ())) >= part
        }
        stops = is_behind(trial.trial_id, seen, self._keep, self._least)
        return str(TrialScheduler.STOP if stops else TrialScheduler.CONTINUE)
