"""The public door: `ElasticRingTrainer(...).fit() -> Result`, after Ray Train's conventions.

The trainer checks every setting, attaches to a Ray cluster or starts a local one, finds or starts the
coordinator, and follows it. It holds no state of the training: killed, it can be started again under the
same run name within the lease and goes on following.
"""

from __future__ import annotations

import json
import logging
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from torch import nn

from elastic_ring import errors
from elastic_ring.attention.kernels.table import BACKENDS
from elastic_ring.attention.layers import LayerPatterns
from elastic_ring.attention.machine import Machine
from elastic_ring.attention.spec import parse_pattern
from elastic_ring.config import RunConfig, ScalingConfig, StepConfig, check_lasting, check_together, digest, environment
from elastic_ring.data.order import Order
from elastic_ring.data.source import SourceConfig, hold_out, open_source
from elastic_ring.mesh import Mesh
from elastic_ring.model.loss import language_model_loss
from elastic_ring.monitor.metrics import CONFIG_NAME, SUMMARY_NAME, StepMetrics, write_json
from elastic_ring.monitor.progress import ProgressLine
from elastic_ring.runtime import attach
from elastic_ring.runtime.bits import versions
from elastic_ring.runtime.charter import Charter
from elastic_ring.runtime.cluster import NAMESPACE, WORKER_ENVIRONMENT, actor_name, room, worker_environment
from elastic_ring.runtime.coordinator import Coordinator
from elastic_ring.runtime.session import interruptible, lease, ray_session
from elastic_ring.train.check_pattern import check_pattern
from elastic_ring.train.compiling import check_compiles
from elastic_ring.train.layouts import AUTO, Layouts, check_layers
from elastic_ring.train.optim import OptimConfig, OptimizerFactory
from elastic_ring.train.task import Initial, LossFunction, TrainingTask, check_parts
from elastic_ring.train.wrap import check_buildable

log = logging.getLogger(__name__)

FOLLOW_S = 0.4
# Every cluster's head has one of this. Its loss ends the cluster anyway; a soft affinity is not kept by Ray.
HEAD_RESOURCE, HEAD_SHARE = "node:__internal_head__", 0.001


@dataclass(frozen=True)
class Result:
    """What `fit` returns: `summary` as in summary.json, the run's folder, the weights' file."""

    summary: dict[str, Any]
    run_dir: Path
    weights: Path
    metrics: dict[str, float] = field(default_factory=dict)


class ElasticRingTrainer:
    """Trains `model()` on `data` over rings that may lose and gain workers.

    Args:
        model: builds the module; it must attend through `batch.attention`.
        data: a source of packed sequences (`StdlibText`, `TextFiles`, `TokenShards`, or your own).
        loss: (model, batch) -> (sum over this slice's targets, number of targets).
        step, optim, scaling, run: settings; see their classes.
        optimizer: named local shards -> optimizer; AdamW from `optim` by default.
        initial: first values by parameter name; by default the module's own under the seed.
        units: the submodules that FSDP2 gathers one at a time; by default the largest ModuleList's items.
        pattern: which keys each layer's attention keeps, as `LayerPatterns` or in the short form of
            `attention.spec`, for example "sinks:64+window:512"; by default all (dense, causal).
        machine: what `step.layout="auto"` prices layouts with: measured figures, as a `Machine` or the file that
            `jobs/calibrate.py` wrote; by default those of an H200.

    Raises: ValueError for any setting that cannot work, before anything is started.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        data: SourceConfig,
        *,
        loss: LossFunction = language_model_loss,
        step: StepConfig | None = None,
        optim: OptimConfig | None = None,
        scaling: ScalingConfig | None = None,
        run: RunConfig | None = None,
        optimizer: OptimizerFactory | None = None,
        initial: Initial | None = None,
        units: Callable[[nn.Module], Sequence[nn.Module]] | None = None,
        pattern: LayerPatterns | str | None = None,
        machine: Machine | str | Path | None = None,
    ) -> None:
        step = step or StepConfig()
        self.scaling = scaling or ScalingConfig()
        self.run = run or RunConfig()
        self.task = TrainingTask(
            model, data, step, optim or OptimConfig(total_steps=step.steps), loss, optimizer, initial, units,
            parse_pattern(pattern) if isinstance(pattern, str) else pattern,
            Machine.read(machine) if isinstance(machine, str | Path) else machine,
        )  # fmt: skip
        check_parts(self.task)
        if self.task.machine is not None and step.layout != AUTO:
            raise ValueError(
                f"machine={machine}: layout={step.layout!r} prices nothing; set layout='auto', or leave machine out"
            )
        check_together(self.scaling, step, self.run.faults)
        check_kernel(step.kernel, self.scaling.device)
        if data.context_tokens != step.context_tokens:
            raise ValueError(
                f"data.context_tokens={data.context_tokens} differs from step.context_tokens={step.context_tokens}: "
                "set both to the same"
            )

    def fit(self) -> Result:
        """Train to the end, whatever dies on the way. Blocks.

        Raises: ValueError for settings that the data or the cluster refuses; a class of `elastic_ring.errors`
        when the run fails; KeyboardInterrupt after Ctrl-C or SIGTERM, once everything is cleared (it says so).
        """
        check_lasting(self.run.folder)
        done = self._finished()
        if done is not None:
            log.info("run %s is finished already; its summary is in %s", self.run.name, self.run.folder)
            return done
        fingerprint = open_source(self.task.data).fingerprint
        training_order(self.task)
        check_writable(self.run.folder)
        check_buildable(self.task)
        check_layers(self.task)
        layouts = Layouts(self.task)
        layouts.choice(self.scaling.cp, self.scaling.device)
        if self.scaling.device == "cpu":  # the driver of a run on GPUs may have none, nor a compiler for them
            check_compiles(self.task, "cpu")
        if self.scaling.device == "cuda":
            check_pattern(self.task, self.scaling.cp, layouts)
        check_portable(self.task)
        if self.scaling.device == "cuda":
            log.warning("device='cuda': runs on one host of several GPUs only, so far; see Limits in the README")
        if self.scaling.dp == 1:
            log.warning("dp=1: no other ring holds the state, so the next loss of a worker ends the run; dp=2 heals it")
        with ray_session(self.scaling):
            attempt = secrets.token_hex(8)
            with interruptible(self.run, attempt) as followed:
                coordinator = self._coordinator(fingerprint, attempt)
                if coordinator is None:
                    return self._ended_meanwhile()
                followed.append(coordinator)
                with lease(coordinator, self.run.timeouts.lease_s / 6):
                    end = self._follow(coordinator)
            ray.kill(coordinator, no_restart=True)
        return self._result(end)

    # ------------------------------------------------------------ attaching

    def _finished(self) -> Result | None:
        """The result of an earlier submission that ended well; refuses the same name with other settings."""
        recorded = self.run.folder / CONFIG_NAME
        if recorded.exists():
            config = _recorded(recorded)
            if config["run"]["name"] != self.run.name:
                raise ValueError(
                    f"run_dir={self.run.run_dir!r} holds run {config['run']['name']!r}, not {self.run.name!r}: choose "
                    "another run_dir, or submit it under its own name to go on"
                )
            attach.refuse_other_settings(
                self.run, config["digest"], self._digest, f"its folder {self.run.folder}",
                attach.differences(config, self._config()),
            )  # fmt: skip
        path = self.run.folder / SUMMARY_NAME
        if not path.exists():
            return None
        return self._good(json.loads(path.read_text()))

    @property
    def _digest(self) -> str:
        task = self.task
        faults = [str(fault) for fault in self.run.faults]
        code = list(self._code().values())
        # Only a run that has a pattern, or figures, names them: runs without keep the digest they had.
        own = [] if task.pattern is None else [task.pattern.identity]
        own += [] if task.machine is None else [repr(task.machine)]
        return digest(self.scaling, task.step, task.optim, described(task.data), faults, code, *own)

    def _code(self) -> dict[str, str]:
        """What of the run is code: its place and its arguments."""
        task = self.task
        parts = {"model": task.model, "loss": task.loss, "optimizer": task.optimizer, "initial": task.initial,
                 "units": task.units}  # fmt: skip
        return {name: described(part) for name, part in parts.items()}

    def _ended_meanwhile(self) -> Result:
        done = self._finished()
        assert done is not None
        log.info("run %s has finished meanwhile; its summary is in %s", self.run.name, self.run.folder)
        return done

    def _coordinator(self, fingerprint: str, attempt: str) -> Any | None:
        """The run's coordinator, found or made; None when the run has ended well since this submission began.

        Raises ValueError when the cluster cannot hold the mesh.
        """
        coordinator, is_own = self._settled(fingerprint, attempt)
        if coordinator is not None:
            attach.tell_other_versions(self.run, versions(self.scaling.device))  # than an earlier submission recorded
            if is_own or not (self.run.folder / CONFIG_NAME).exists():  # or whoever made it did not come to it
                self._write_config()
        return coordinator

    def _settled(self, fingerprint: str, attempt: str) -> tuple[Any | None, bool]:
        """As `_coordinator`; and whether this submission made it."""
        found = attach.running_coordinator(self.run, self._digest)
        if found is not None:
            return found, False
        # A coordinator writes the summary before it goes, so whoever finds none here finds it gone for another reason.
        if (self.run.folder / SUMMARY_NAME).exists():
            return None, False
        attach.refuse_if_written_to(self.run)
        room(self.scaling)
        run = self._run_with_environment()
        charter = Charter(run, self.scaling, self.task, attempt, self._digest, time.time(), fingerprint)
        made = (
            ray.remote(Coordinator)
            .options(
                name=actor_name(self.run.name, "coordinator"), namespace=NAMESPACE, lifetime="detached",
                get_if_exists=True, max_restarts=-1, max_task_retries=-1, max_concurrency=64, num_cpus=0,
                resources={HEAD_RESOURCE: HEAD_SHARE},
            )
            .remote(charter)
        )  # fmt: skip
        if attach.attempt_of(made, self.run, starts=True) == attempt:
            return made, True
        return self._settled(fingerprint, attempt)  # another submission was quicker: followed if it asks for the same

    def _run_with_environment(self) -> RunConfig:
        """The run with all that its workers' processes are to find in their environment."""
        of_job = ray.get_runtime_context().runtime_env.get("env_vars") or {}
        env = worker_environment(self.scaling.device, self.run.env, environment(), of_job)
        changed = [f"{name}={value}" for name, value in env.items() if value != WORKER_ENVIRONMENT.get(name, value)]
        if changed:
            log.warning("workers get %s, not elastic_ring's own values", ", ".join(changed))
        return replace(self.run, env=env)

    def _write_config(self) -> None:
        self.run.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.run.folder / CONFIG_NAME, self._config(), durable=True)

    def _config(self) -> dict[str, Any]:
        """The settings as they are recorded."""
        settings = {"scaling": self.scaling, "step": self.task.step, "optim": self.task.optim, "data": self.task.data,
                    "run": self.run}  # fmt: skip
        shown = {name: json.loads(json.dumps(vars(value), default=str)) for name, value in settings.items()}
        shown["run"]["env"] = sorted(self.run.env)  # values may be secrets
        own = {"pattern": self.task.pattern, "machine": self.task.machine}
        given = {name: str(value) for name, value in own.items() if value is not None}
        shown["data"]["source"] = type(self.task.data).__qualname__
        found = versions(self.scaling.device)
        return {"digest": self._digest, **shown, "code": self._code(), **given, "versions": found}

    # ------------------------------------------------------------ following

    def _follow(self, coordinator: Any) -> dict[str, Any]:
        """Show progress until the end; returns how it ended. Renews the lease by asking."""
        last_step, num_lines, lost_since = -1, 0, None
        attempt = attach.attempt_of(coordinator, self.run)
        with ProgressLine(sys.stderr, self.task.step.steps) as progress:
            opened = False
            while True:
                try:
                    news = ray.get(
                        coordinator.follow.remote(last_step, num_lines), timeout=self.run.timeouts.hello_s
                    )
                    lost_since = None
                except ray.exceptions.ActorDiedError as error:
                    end = attach.end_on_record(self.run, attempt)
                    if end is not None:  # another driver has heard of the end first, and let the coordinator go
                        return end
                    raise errors.CoordinatorLost(f"the coordinator of run {self.run.name} is gone: {error}") from error
                except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError) as error:
                    # A coordinator that was killed or froze comes back by itself.
                    lost_since = lost_since or time.monotonic()
                    if time.monotonic() - lost_since > self.run.timeouts.lease_s:
                        raise errors.CoordinatorLost(f"no coordinator for {self.run.timeouts.lease_s} s") from error
                    continue
                if not opened and (news["steps"] or news["ended"]):
                    progress.open(news["steps"][0]["step"] if news["steps"] else 0)
                    opened = True
                for line in news["lines"]:
                    progress.note(line)
                num_lines += len(news["lines"])
                for record in news["steps"] if self.run.progress else ():
                    progress.step(_shown(record))
                last_step = max([last_step, *(record["step"] for record in news["steps"])])
                if news["ended"] is not None:
                    return dict(news["ended"])
                time.sleep(FOLLOW_S)

    def _result(self, end: dict[str, Any]) -> Result:
        for name in end.get("left_behind", []):
            log.error("left behind: %s", name)
        if end["error"]:
            kind = getattr(errors, end["error"], errors.RunFailed)
            if kind is errors.CrashLoop and int(end["facts"]["step"]) < self.task.step.steps:
                ids = training_order(self.task).sample_ids(int(end["facts"]["step"]))
                end["facts"]["samples"] = ids
                named = ", ".join(map(str, ids))
                end["message"] += f"\nThe batch of that step is sequences {named} of {self.task.data}"
            raise kind(end["message"], **end["facts"])
        if "summary" not in end:
            raise errors.RunFailed(f"the run ended before its last step: {end['message']}")
        return self._good(end["summary"])

    def _good(self, summary: dict[str, Any]) -> Result:
        last = {"loss": float.fromhex(summary["losses"][-1])}
        return Result(summary, self.run.folder, self.run.folder / "weights.safetensors", last)


def check_kernel(name: str, device: str) -> None:
    """Raises ValueError for a pinned kernel that is none, or none for this kind of device."""
    names = [backend.name for backend in BACKENDS if device in backend.devices]
    if name and name not in names:
        raise ValueError(f"kernel={name!r} is no attention kernel for device={device!r}: choose one of "
                         f"{', '.join(names)}, or leave it out to have one chosen")  # fmt: skip


def described(part: Any) -> str:
    """What names a user's callable or object in the digest of a run: its place in the code and its arguments.

    Equal in every process: an object without a `repr` of its own is named by its class, not by its address.
    """
    if isinstance(part, partial):
        arguments = [described(value) for value in part.args]
        named = [f"{name}={described(value)}" for name, value in part.keywords.items()]
        return f"{described(part.func)}({', '.join(arguments + named)})"
    if hasattr(part, "__qualname__"):
        return f"{part.__module__}.{part.__qualname__}"
    if repr(part) == object.__repr__(part):
        return f"{type(part).__module__}.{type(part).__qualname__}"
    return repr(part)


def check_portable(task: TrainingTask) -> None:
    """Raises ValueError for a task that cannot be sent to workers."""
    try:
        ray.cloudpickle.dumps(task)
    except Exception as error:
        raise ValueError(
            f"the model, loss, optimizer, data or initial cannot be sent to workers ({type(error).__name__}: {error}): "
            "give functions and classes of a module, or plain objects, without open files, locks or threads in them"
        ) from error


def check_writable(folder: Path) -> None:
    """Raises ValueError for a run folder in which nothing can be written."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder if folder.is_dir() else folder.parent):
            pass
    except OSError as error:
        raise ValueError(f"run_dir={str(folder)!r} cannot be written to ({error}): give a folder that can") from error


def training_order(task: TrainingTask) -> Order:
    """Which sequences each step uses. Raises ValueError for a corpus that cannot be read or is less than a batch."""
    held = task.step.num_val_sequences if task.step.val_every_steps else 0
    training, _ = hold_out(open_source(task.data), num_sequences=held)
    return Order(task.step.seed, task.step.global_batch, training.num_sequences)


def _shown(record: dict[str, Any]) -> StepMetrics:
    mesh = Mesh(record["dp"], record["cp"])
    return StepMetrics(
        step=record["step"], loss=record["loss"], grad_norm=record["grad_norm"], lr=record["lr"],
        num_tokens=record["num_tokens"], tokens_per_s=record["num_tokens"] / max(record["step_s"], 1e-9),
        step_s=record["step_s"], skipped=record["skipped"], generation=record["generation"], mesh=mesh,
        num_members=mesh.size,
    )  # fmt: skip


def _recorded(path: Path) -> dict[str, Any]:
    """Raises ValueError for a config.json that says nothing."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    except ValueError as error:
        raise ValueError(
            f"run_dir={str(path.parent)!r}: its {path.name} cannot be read ({error}), so nobody can tell whether the"
            " folder holds this run: choose another run_dir, or remove that file if you know that it does"
        ) from error
