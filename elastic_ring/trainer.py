"""The public entry point: `ElasticRingTrainer(...).fit() -> Result`, after Ray Train's conventions.

The trainer validates every setting, attaches to a Ray cluster or starts a local one, finds or starts the run's
coordinator, and follows it. It keeps no training state: if the driver dies, start it again under the same run name
within the lease and it attaches to the same run. No training and no recovery decision belongs here.
"""

from __future__ import annotations

import json
import logging
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import ray
from torch import nn

from elastic_ring import errors
from elastic_ring.attention.kernels.registry import covering
from elastic_ring.attention.patterns.layers import LayerPatterns
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.config import (
    RunConfig,
    ScalingConfig,
    StepConfig,
    check_copies,
    check_lasting,
    check_loss_spikes,
    check_together,
    digest,
    environment,
)
from elastic_ring.control.decisions.data_order import take_facts, version_at
from elastic_ring.costs import CostModel
from elastic_ring.data.filesystem import at_submission
from elastic_ring.data.packing import Files
from elastic_ring.data.preparation.materialise import DatasetTokens, as_source, materialised
from elastic_ring.data.prepared import may_grow, versions_beside, with_versions
from elastic_ring.data.sampling.order import SampleOrder, SkippingOrder, by_batch
from elastic_ring.data.sampling.validation import (
    ValidationSet,
    ValidationSource,
    measured,
    of_set,
    open_sets,
    with_sets,
)
from elastic_ring.data.source import SourceConfig, fingerprinted, hold_out, open_source, order_of
from elastic_ring.files import plain_json, shown_plain, shown_url
from elastic_ring.forecast.pass_choice import AS_SET, choose_pass
from elastic_ring.mesh import Mesh
from elastic_ring.monitor.callbacks import Callback, CallbackDelivery, RunInfo, check_callbacks
from elastic_ring.monitor.json_files import read_json, set_aside
from elastic_ring.monitor.metrics import (
    CONFIG_NAME,
    storage_error,
    write_json,
)
from elastic_ring.monitor.progress import ProgressLine
from elastic_ring.monitor.result import Result
from elastic_ring.monitor.start_times import Stages
from elastic_ring.runtime import run_storage
from elastic_ring.runtime.agent import notices
from elastic_ring.runtime.autoscaler import ON_HEAD
from elastic_ring.runtime.code_digest import code_digest
from elastic_ring.runtime.coordinator.actor import Coordinator
from elastic_ring.runtime.coordinator.resume import Resume, find_resume
from elastic_ring.runtime.coordinator.run_spec import RunSpec, is_finished, summary_of
from elastic_ring.runtime.driver import attach
from elastic_ring.runtime.driver.absence import Absence
from elastic_ring.runtime.driver.cluster import (
    NAMESPACE,
    WORKER_ENVIRONMENT,
    actor_name,
    live_nodes,
    room,
    worker_environment,
)
from elastic_ring.runtime.driver.loss_cost import with_settled_copies
from elastic_ring.runtime.driver.pass_size import gpu_of_run, recorded_pass
from elastic_ring.runtime.driver.ray_session import cluster, leaving, ray_session
from elastic_ring.runtime.driver.session import interruptible, lease
from elastic_ring.runtime.head import reconnect_s, warn_if_shorter
from elastic_ring.runtime.identity import Identity, contents_of, described, identity_of
from elastic_ring.runtime.run_folder import check_writable
from elastic_ring.runtime.worker.env_fingerprint import versions
from elastic_ring.state.checkpoints.manifest import located
from elastic_ring.state.checkpoints.stored_weights import RunWeights
from elastic_ring.state.storage.folder import open_or_refuse
from elastic_ring.train.optim import OptimConfig, OptimizerFactory, Schedule, check_cpu_offload, check_schedule
from elastic_ring.train.startup.check_pattern import check_pattern
from elastic_ring.train.startup.layouts import AUTO, Layouts, check_layers, check_rows
from elastic_ring.train.task import (
    Initial,
    LossFunction,
    TrainingTask,
    check_parts,
    check_vocabulary,
    description_of,
    parts_of,
)
from elastic_ring.train.wrap import check_buildable, check_linears, check_own_optimizer, num_parameters

log = logging.getLogger(__name__)

FOLLOW_S = 0.4
FETCH_S = 5.0


class ElasticRingTrainer:
    """Trains `model()` on `data` over rings that may lose and gain workers.

    Args:
        model: builds the module, which must call `batch.attention` for its attention.
        data: a source of packed sequences (`PreparedTokens`, `StdlibText`, `TextFiles`, `TokenShards`, or your own),
            or a `ray.data.Dataset` or `datasets.Dataset` with a column `text`, which `fit` writes out and prepares
            beside the run's folder (`DatasetTokens` for other columns and tokenizers).
        loss: (model, batch) -> (sum over this slice's targets, number of targets); by default next-token cross-entropy.
        scaling_config, run_config, step_config, optim_config: settings; see their classes.
        optimizer: named local shards -> optimizer; by default AdamW with `optim_config`.
        initial: initial values by parameter name; by default the module's own under the seed.
        units: the submodules that FSDP2 gathers one at a time; by default the items of the largest ModuleList.
        pattern: which keys each layer's attention keeps, as `LayerPatterns` or in the short form of
            `attention.patterns.parse`, for example "sinks:64+window:512"; by default all keys (dense, causal).
        cost_model: measured figures by which `step_config.layout="auto"` compares layouts, as a `CostModel` or
            the file that `elastic-ring calibrate` writes; by default those of an H200.
        metrics: name -> (model, batch) -> (sum, number), for the validations; `val_NAME` in metrics.jsonl.
        validation: name -> `ValidationSet`: several sets in place of the held-out sequences alone; each has
            `val_SET_loss`, `val_SET_perplexity` and `val_SET_NAME`, and `val_loss` is their weighted mean.
        lr_schedule: step -> learning rate, in place of `optim_config`'s: a pure function.
        callbacks: receive steps, validations, recoveries and checkpoints in this process; see `Callback`.

    Raises: ValueError for settings that cannot work, before anything is started.
    """

    forecast: Callable[[], dict[str, float]] | None = None
    """Asked for `planned` once the sequences of a pass are chosen."""
    gpu: str | None = None
    """The type of the run's GPUs, known once Ray is there; None without a forecast of it."""

    def __init__(
        self,
        model: Callable[[], nn.Module],
        data: SourceConfig | Any,
        *,
        loss: LossFunction | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        step_config: StepConfig | None = None,
        optim_config: OptimConfig | None = None,
        optimizer: OptimizerFactory | None = None,
        initial: Initial | None = None,
        units: Callable[[nn.Module], Sequence[nn.Module]] | None = None,
        pattern: LayerPatterns | str | None = None,
        cost_model: CostModel | str | Path | None = None,
        metrics: Mapping[str, LossFunction] | None = None,
        lr_schedule: Schedule | None = None,
        validation: Mapping[str, ValidationSet] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        step = step_config or StepConfig()
        sets = _with_sources(validation or {}, step.context_tokens)
        check_callbacks(callbacks, step.validates, measured(sets, metrics or {}))
        self.callbacks = tuple(callbacks)
        parts, data = parts_of(model, step), as_source(data, step.context_tokens)
        self.scaling_config = scaling_config or ScalingConfig()
        self.run_config = run_config or RunConfig()
        self.task = TrainingTask(
            model,
            data,
            step,
            optim_config or OptimConfig(total_steps=step.steps),
            parts.loss if loss is None else loss,
            optimizer,
            parts.initial if initial is None else initial,
            units,
            parts.pattern if pattern is None else parse_pattern(pattern) if isinstance(pattern, str) else pattern,
            CostModel.read(cost_model) if isinstance(cost_model, str | Path) else cost_model,
            dict(metrics or {}),
            lr_schedule,
            parts.flops,
            any(callback.controls for callback in callbacks),
            parts.frozen,
            sets,
        )
        self._fetched_s = 0.0
        self._stages: Stages | None = None
        self._contents: tuple[SourceConfig, str, Files] | None = None
        self._validation_contents: dict[str, tuple[Any, str]] = {}
        self.config_files: dict[str, str] = {**parts.files}  # name -> text of files written next to config.json
        self.planned: dict[str, float] = {}  # step_s, gpu_bytes of a rank, goodput
        check_parts(self.task)
        for source in (data, *(one.data for one in sets.values() if one.data is not None)):
            check_vocabulary(parts, source)
        check_schedule(lr_schedule, self.task.optim, step.steps)
        check_cpu_offload(self.scaling_config.cpu_offload, optimizer)
        if self.task.cost_model is not None and step.layout != AUTO:
            raise ValueError(
                f"cost_model={cost_model}: layout={step.layout!r} prices nothing; set layout='auto', "
                "or leave cost_model out"
            )
        check_together(self.scaling_config, step, self.run_config.faults)
        check_copies(self.scaling_config.mesh, self.run_config.copies)
        check_loss_spikes(self.run_config, self.task.optim)
        check_kernel(step.kernel, self.scaling_config.device)
        if data.context_tokens != step.context_tokens:
            raise ValueError(
                f"data.context_tokens={data.context_tokens} differs from step.context_tokens={step.context_tokens}: "
                "set both to the same"
            )

    @classmethod
    def restore(cls, path: str, model: Callable[[], nn.Module], data: SourceConfig, **settings: Any) -> Self:
        """A trainer whose run begins at a checkpoint: `path` leads to a run, or to one of its checkpoints.

        The other arguments are the trainer's. A `run_config` keeps its own name and storage; without one the
        run goes on under its name in its storage. Raises ValueError as the constructor does.
        """
        storage, _ = located("", path.rstrip("/"))
        run = settings.pop("run_config", None)
        if run is None:
            before, _, name = (storage or path.rstrip("/")).rpartition("/")
            run = RunConfig(name=name, storage_path=before, resume=path if storage else "auto")
        else:
            run = replace(run, resume=path)
        return cls(model, data, run_config=run, **settings)

    def fit(self) -> Result:
        """Train to the last step, recovering from failures on the way. Blocks.

        Raises: ValueError for settings that the data or the cluster rules out; a class of `elastic_ring.errors` when
        the run fails; KeyboardInterrupt after Ctrl-C, SIGTERM or SIGHUP, once the run's actors are removed (its
        message says what is left).
        """
        self._stages = stages = Stages("process, imports, settings")
        _ = self._sources  # before anybody edits a file
        stages.begin("checks the data and the model")
        check_lasting(self.run_config.driver_folder)
        self._materialise()
        self._fetch()
        done = self._finished()
        if done is not None:
            log.info(
                "run %s is finished already; its summary is in %s", self.run_config.name, self.run_config.driver_folder
            )
            return self._told(done)
        fingerprint = at_submission(lambda: fingerprint_of(self.task), self.run_config.timeouts.storage_s)
        training_order(self.task)
        check_writable(self.run_config.driver_folder)
        self._resume()
        check_task(self.task, self.scaling_config.cp, self.scaling_config.device)
        if self.run_config.notices:
            notices.find(self.run_config.notices)
        stages.begin("starts Ray, or finds it")
        with ray_session(self.scaling_config, self.run_config.timeouts.lease_s):
            self.gpu = gpu_of_run(self.scaling_config)
            self.choose_pass(self.gpu)
            if self.forecast is not None:
                self.planned = self.forecast()
            stages.begin("looks for the run and for room")
            attempt = secrets.token_hex(8)
            with interruptible(self.run_config, attempt) as followed:
                coordinator = self._coordinator(fingerprint, attempt)
                if coordinator is None:
                    return self._ended_meanwhile()
                followed.append(coordinator)
                if attach.head_is_kept(coordinator, self.run_config):
                    warn_if_shorter("this driver", reconnect_s(environment()), self.run_config.timeouts.lease_s)
                with lease(coordinator, self.run_config.timeouts.lease_s / 6):
                    end = self._follow(coordinator)
            with leaving():
                if not attach.remove(coordinator, self.run_config):
                    log.error("left behind: the coordinator of run %s, which was killed", self.run_config.name)
        return self._result(end)

    def choose_pass(self, gpu: str | None) -> None:
        """Resolve "auto" of `sequences_per_pass` and `keep_activations` for GPUs of this type, None for an unknown one.
        A run on record keeps its number. Raises what `_resume` raises."""
        step, scaling, pattern = self.task.step, self.scaling_config, self.task.pattern
        if AUTO not in (step.sequences_per_pass, scaling.keep_activations):
            return
        on_record, density, config = False, 1.0, None
        if step.sequences_per_pass == AUTO and self.run_config.resume != "never":
            with suppress(errors.RecordDamaged):  # `_finished` has reported it
                config = _recorded(self.run_config.driver_folder / CONFIG_NAME)
            number = recorded_pass(step, config, self._resume())
            if number is not None:
                step, on_record = replace(step, sequences_per_pass=number), True
        parts = parts_of(self.task.model, step)
        sizes = parts.sizes if self.task.loss is parts.loss else None
        if pattern is not None and sizes is not None:
            shape = sizes.config
            density = pattern.density(step.context_tokens, shape.num_layers, shape.num_heads, shape.num_kv_heads)
        choice = choose_pass(sizes, scaling, step, self.run_config, gpu, density)
        log.info("%s", choice.reason.replace(AS_SET, "as on record of this run") if on_record else choice.reason)
        step, self.scaling_config = choice.settings(step, scaling)
        self.task = replace(self.task, step=step)

    def _materialise(self) -> None:
        """Write datasets out beside the run's folder."""

        def written(data: Any, name: str) -> Any:
            uri = f"{self.run_config.storage_uri}-data{name}"
            return materialised(data, uri, cluster) if isinstance(data, DatasetTokens) else data

        validation = {
            name: replace(one, data=written(one.data, f"-{name}")) for name, one in self.task.validation.items()
        }
        self.task = replace(self.task, data=written(self.task.data, ""), validation=validation)

    # ------------------------------------------------------------ attaching

    def _finished(self) -> Result | None:
        """The result of an earlier submission that succeeded, else None. Raises ValueError if its settings differ."""
        folder = self.run_config.driver_folder
        try:
            config = _recorded(folder / CONFIG_NAME)
        except errors.RecordDamaged as error:
            log.warning("%s: compares the settings with the run's checkpoints", error)
            config = None
        # Of a finished run the data may be gone: its record says whose summary this is.
        of_record = self.identity.digest if config is None else Identity(config.get("identity", {})).digest
        is_whole = is_finished(self.run_config, folder, self.task.step.steps, of_record)
        if config is not None:
            if config["run"]["name"] != self.run_config.name:
                raise ValueError(
                    f"run_dir={str(self.run_config.driver_folder)!r} holds run {config['run']['name']!r}, "
                    f"not {self.run_config.name!r}: "
                    "choose another run_dir, or submit it under its own name to go on"
                )
            same_data = config.get("data") == description_of(self.task)["data"]
            of_data = config.get("identity", {}).get("data")
            if is_whole and same_data and of_data is not None:  # then the data may be gone
                self._contents = self.task.data, of_data, ()
            attach.refuse_other_settings(
                self.run_config,
                attach.differences(
                    config,
                    self.identity,
                    {"files": self._contents[2] if self._contents else (), "plans": self.task.optim.plans},
                ),
                f"its folder {self.run_config.driver_folder}",
                f"; for more steps alone, submit it with extend=True (--extend); another name with "
                f"resume={self.run_config.storage_uri!r} goes on from its newest checkpoint",
            )
            attach.refuse_other_code(self.run_config, config, self._sources, is_whole=is_whole)
            if is_whole:
                self._tell_moved()
        if not is_whole:
            return None
        attach.refuse_without_weights(self.run_config)
        return self._good(summary_of(folder, of_record))

    @property
    def identity(self) -> Identity:
        """What a resumed run must share with the one that wrote its checkpoint. Raises ValueError for data that cannot
        be read."""
        task = self.task
        if self._contents is None or self._contents[0] is not task.data:
            self._contents = task.data, *contents_of(task.data)
        step = {name: getattr(task.step, name) for name in ("seed", "global_batch", "context_tokens", "param_dtype")}
        step["num_val_sequences"] = task.num_held_out
        # What only watches the training, or only says how it is done, may change.
        code = {
            name: value for name, value in self._code().items() if name != "units" and not name.startswith("metric ")
        }
        return identity_of(task, step, code, self._contents[1])

    @property
    def _places(self) -> dict[str, str]:
        return {**self.identity.places, "run": self.run_config.storage_uri}

    def _tell_moved(self, before: Mapping[str, str] = MappingProxyType({})) -> None:
        """Where the run's record, or else the checkpoint where it begins, has other places."""
        with suppress(errors.RecordDamaged):
            before = {**before, **(_recorded(self.run_config.driver_folder / CONFIG_NAME) or {}).get("places", {})}
        replace(self.identity, places=self._places).tell_moved(self.run_config.name, before)

    def _resume(self) -> Resume:
        """Where this submission begins. Raises ValueError if the run cannot be resumed, or a later manifest has
        changed; StorageFailed where the storage stays away."""
        try:
            found = find_resume(self.run_config, self.identity, grows=may_grow(self.task.data))
        except errors.CheckpointDamaged as error:
            raise ValueError(f"resume={self.run_config.resume!r}: {error}") from error
        if found.corpus:  # they lie beside the first one, also where that has moved
            found = replace(found, corpus=versions_beside(self.task.data, found.corpus))
            at_submission(lambda: open_source(with_versions(self.task.data, found.corpus)))
        return found

    @property
    def _digest(self) -> str:
        task = self.task
        faults = [str(fault) for fault in self.run_config.faults]
        code = list(self._code().values())
        # Left out where unset, so that the digests of runs without a pattern or cost model stay the same.
        own = [] if task.pattern is None else [task.pattern.identity]
        own += [] if task.cost_model is None else [repr(task.cost_model)]
        own += [str(self._validated)] if task.validation else []
        usual = {("kv_wire", "native"), ("experts", "auto"), ("linears", "native"), ("val_every_tokens", 0)}
        step = {name: value for name, value in vars(task.step).items() if (name, value) not in usual}
        optim = {name: value for name, value in vars(task.optim).items() if (name, value) != ("replanned", ())}
        scaling = replace(self.scaling_config, keep_activations="auto")  # bits do not depend on it
        return digest(scaling, step, optim, self.identity.what["data"], faults, code, *own)

    @property
    def measured_on(self) -> dict[str, str]:
        """Contents of the model, the data and the sets to validate on: what losses can be compared by."""
        return {**self.identity.what, "validation": str(self._validated)}

    @property
    def _validated(self) -> list[tuple[str, float, int | None, str]]:
        """Name, weight, number and contents of each validation set, wherever these lie."""
        found = []
        for name, one in sorted(self.task.validation.items()):
            if one.data is not None and self._validation_contents.get(name, (None,))[0] is not one.data:
                with of_set(name):
                    self._validation_contents[name] = one.data, contents_of(one.data)[0]
            contents = "" if one.data is None else self._validation_contents[name][1]
            found.append((name, one.weight, one.num_sequences, contents))
        return found

    def _code(self) -> dict[str, str]:
        """The parts of the run that are code, each described by its qualified name and arguments."""
        return {name: described(part) for name, part in self._parts.items()}

    @property
    def _parts(self) -> dict[str, Any]:
        task = self.task
        parts: dict[str, Any] = {
            "model": task.model,
            "loss": task.loss,
            "optimizer": task.optimizer,
            "initial": task.initial,
            "units": task.units,
            **{f"metric {name}": metric for name, metric in task.metrics.items()},
        }
        if task.lr_schedule is not None:
            parts["lr_schedule"] = task.lr_schedule
        return parts

    @cached_property
    def _sources(self) -> dict[str, str]:
        """Digests of the code that decides what is trained, as its files are when `fit` begins; of parts with code of
        the user's. An edit between a module's import and that is taken for what runs."""
        watch = {name for name in self._parts if name == "units" or name.startswith("metric ")}
        found = {name: code_digest(part) for name, part in self._parts.items() if name not in watch}
        return {name: digest for name, digest in found.items() if digest}

    def _ended_meanwhile(self) -> Result:
        self._fetch()
        done = self._finished()
        assert done is not None
        log.info(
            "run %s has finished meanwhile; its summary is in %s", self.run_config.name, self.run_config.driver_folder
        )
        return self._told(done)

    def _coordinator(self, fingerprint: str, attempt: str) -> Any | None:
        """The run's coordinator, found or created; None when the run has succeeded since this submission began.

        Raises: ValueError when the cluster cannot hold the mesh.
        """
        coordinator, is_own = self._settled(fingerprint, attempt)
        if coordinator is not None:
            attach.tell_other_versions(self.run_config, versions(self.scaling_config.device))
            # The submission that created the coordinator may have died before it wrote the config.
            if is_own or not (self.run_config.driver_folder / CONFIG_NAME).exists():
                try:
                    self._write_config()
                except OSError as error:
                    why = storage_error(self.run_config.driver_folder, error)
                    if is_own:
                        coordinator.abandon.remote(why)
                    raise errors.RunFailed(why) from error
        return coordinator

    def _settled(self, fingerprint: str, attempt: str) -> tuple[Any | None, bool]:
        """(coordinator as in `_coordinator`, whether this submission created it)."""
        found = attach.running_coordinator(
            self.run_config, self._digest, self.identity, self._sources, controls=self.task.asks_callbacks
        )
        if found is not None:
            return found, False
        # A coordinator writes the summary before it exits: without one, it is gone for another reason.
        if is_finished(self.run_config, self.run_config.driver_folder, self.task.step.steps, self.identity.digest):
            return None, False
        attach.refuse_if_written_to(self.run_config)
        start_dp = room(self.scaling_config, self.run_config.name)
        mesh = Mesh(start_dp or self.scaling_config.dp, self.scaling_config.cp)
        check_copies(mesh, self.run_config.copies)
        run = with_settled_copies(
            self._run_with_environment(), mesh, num_parameters(self.task), live_nodes(self.scaling_config)
        )
        resume = self._resume()
        for why in resume.damaged.values():
            log.warning("set aside: %s", why)
        if resume.checkpoints:
            log.info("run %s resumes at step %d from %s", run.name, resume.step, resume.resumed_from[-1]["path"])
        self._tell_moved(resume.places)
        if self._stages is not None:
            self._stages.begin("")
        run_spec = RunSpec(
            run,
            self.scaling_config,
            self.task,
            attempt,
            self._digest,
            time.time(),
            fingerprint,
            self.identity,
            resume,
            start_dp,
            self.planned,
            () if self._stages is None else tuple(self._stages.ended),
            self._sources,
        )
        made = (
            ray.remote(Coordinator)
            .options(
                name=actor_name(self.run_config.name, "coordinator"),
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=-1,
                max_task_retries=-1,
                max_concurrency=64,
                num_cpus=0,
                resources=ON_HEAD,
                scheduling_strategy="DEFAULT",  # not in the placement group of a trial of Ray Tune that starts the run
            )
            .remote(run_spec)
        )
        if attach.attempt_of(made, self.run_config, starts=True) == attempt:
            return made, True
        return self._settled(fingerprint, attempt)  # another submission won; follow it if its settings agree

    def _run_with_environment(self) -> RunConfig:
        """The run config with the full set of environment variables of its workers."""
        of_job = ray.get_runtime_context().runtime_env.get("env_vars") or {}
        env = worker_environment(self.scaling_config.device, self.run_config.env, environment(), of_job)
        changed = [f"{name}={value}" for name, value in env.items() if value != WORKER_ENVIRONMENT.get(name, value)]
        if changed:
            log.warning("workers get %s, not elastic_ring's own values", ", ".join(changed))
        return replace(self.run_config, env=env)

    def _write_config(self) -> None:
        self.run_config.driver_folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.config_files.items():
            (self.run_config.driver_folder / name).write_text(text, encoding="utf-8")
        path = self.run_config.driver_folder / CONFIG_NAME
        try:
            _recorded(path)
        except errors.RecordDamaged as error:
            log.info("%s", set_aside(path, error.message))  # `_finished` has reported it
        write_json(path, self._config(), durable=True)
        run_storage.publish(self.run_config, self.run_config.driver_folder)

    def _fetch(self) -> None:
        """Bring a run's records here from its object store. Raises ValueError where it cannot be asked."""
        if self.run_config.is_remote:
            open_or_refuse(self.run_config.storage_uri, write=False, timeout_s=self.run_config.timeouts.storage_s)
            run_storage.fetch(self.run_config, self.run_config.driver_folder)

    def _config(self) -> dict[str, Any]:
        """The settings as config.json records them."""
        settings = {
            "scaling": self.scaling_config,
            "step": self.task.step,
            "optim": self.task.optim,
            "run": self.run_config,
        }
        text = {name: json.dumps(vars(value), default=str) for name, value in settings.items()}
        shown = {name: shown_plain(plain_json(value)) for name, value in text.items()}
        shown["run"]["env"] = sorted(self.run_config.env)  # values may be secrets
        given = {} if self.task.cost_model is None else {"cost_model": str(self.task.cost_model)}
        found = versions(self.scaling_config.device)
        return {
            "digest": self._digest,
            "identity": dict(self.identity.what),
            "places": self._places,
            "files": () if self._contents is None else self._contents[2],
            **shown,
            **description_of(self.task),
            "code": self._code(),
            "sources": self._sources,
            **({"from": self.task.initial.record} if isinstance(self.task.initial, RunWeights) else {}),
            **given,
            **{f"planned_{name}": value for name, value in self.planned.items()},
            "versions": found,
        }

    # ------------------------------------------------------------ following

    def _follow(self, coordinator: Any) -> dict[str, Any]:
        """Show progress until the run ends; returns how it ended. Each call to the coordinator renews the lease."""
        last_step, num_lines = -1, 0
        attempt = attach.attempt_of(coordinator, self.run_config)
        absence = Absence(self.run_config, ray.get_runtime_context().gcs_address, attempt)
        with self._telling() as telling, ProgressLine(sys.stderr, self.task.step.steps) as progress:
            opened = False
            while True:
                try:
                    news = absence.ask(coordinator, last_step, num_lines)
                except ray.exceptions.ActorDiedError as error:
                    end = attach.end_on_record(self.run_config, attempt)
                    if end is not None:  # another driver saw the end first and killed the coordinator
                        return end
                    absence.gone(error)
                if news is None:
                    continue
                if not opened and (news["steps"] or news["ended"]):
                    progress.open(news["steps"][0].step if news["steps"] else 0)
                    opened = True
                for line in news["lines"]:
                    progress.note(line)
                num_lines += len(news["lines"])
                for metrics in news["steps"] if self.run_config.progress else ():
                    progress.step(metrics)
                last_step = max([last_step, *(metrics.step for metrics in news["steps"])])
                if news.get("phase") != "starting":  # until then the folder may hold an earlier attempt's records
                    awaited = news.get("awaited")
                    self._bring_news(at_once=news["ended"] is not None or awaited is not None)
                    telling.deliver()
                    if awaited is not None:
                        self._answer(coordinator, telling, awaited)
                if news["ended"] is not None:
                    return dict(news["ended"])
                time.sleep(FOLLOW_S)

    def _answer(self, coordinator: Any, telling: CallbackDelivery, step: int) -> None:
        """The run waits after `step` steps for what callbacks want. Who gets no answer here is asked again."""
        requests = telling.requests(step)
        if requests is None:
            return
        try:
            if ray.get(coordinator.answer.remote(step, **requests), timeout=2 * self.run_config.timeouts.hello_s):
                telling.grant(step, requests)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError, ray.exceptions.ActorDiedError):
            log.warning("the coordinator does not take what callbacks want; the driver tries again")

    def _bring_news(self, *, at_once: bool) -> None:
        """Callbacks read the records; a store's are fetched now and then, while the run waits for callbacks, and at the
        end."""
        if self.run_config.is_remote and (at_once or (self.callbacks and time.monotonic() - self._fetched_s > FETCH_S)):
            self._fetched_s = time.monotonic()
            try:
                run_storage.fetch(self.run_config, self.run_config.driver_folder)
            except errors.StorageFailed as error:
                log.warning("the run's records cannot be fetched now, training goes on: %s", error)

    def _telling(self) -> CallbackDelivery:
        run, folder = self.run_config, self.run_config.driver_folder
        return CallbackDelivery(
            self.callbacks,
            RunInfo(run.name, folder, self._config()),
            bring=partial(run_storage.fetch_places, run, folder),
            keep=partial(run_storage.keep_places, run, folder),
        )

    def _told(self, done: Result) -> Result:
        """`done`, once the callbacks have received what an earlier driver left."""
        with self._telling() as telling:
            telling.deliver()
        return done

    def _result(self, end: dict[str, Any]) -> Result:
        for name in end.get("left_behind", []):
            log.error("left behind: %s", name)
        if end["error"]:
            kind = getattr(errors, end["error"], errors.RunFailed)
            of_a_step = kind in (errors.CrashLoop, errors.UserCodeFailed)
            if of_a_step and int(end["facts"]["step"]) < self.task.step.steps:
                self._name_batch(end)
            raise kind(end["message"], **end["facts"])
        if "summary" not in end:
            raise errors.RunFailed(f"the run ended before its last step: {end['message']}")
        return self._good(end["summary"])

    def _name_batch(self, end: dict[str, Any]) -> None:
        """Add to the end of a crash loop, or of the user's code, which sequences the step has, by its manifest."""
        step, (versions, skips) = int(end["facts"]["step"]), take_facts(end["facts"])
        try:
            order = training_order(replace(self.task, data=with_versions(self.task.data, by_batch(versions, skips))))
            ids = SkippingOrder(order, skips).sample_ids(step)
        except (ValueError, errors.StorageFailed) as error:  # the crashes say more than a manifest that is gone
            end["message"] += f"\nThe batch of that step cannot be named: {error}"
            return
        end["facts"]["samples"] = ids
        version, named = version_at(versions, step), ", ".join(map(str, ids))
        of = (
            shown_url(str(self.task.data))
            if version is None
            else f"{version.uri} (which holds from step {version.first_step} on)"
        )
        end["message"] += f"\nThe batch of that step is sequences {named} of {of}"

    def _good(self, summary: dict[str, Any]) -> Result:
        run = self.run_config
        return Result(summary, run.driver_folder, storage_uri=run.storage_uri if run.is_remote else "")


def check_kernel(name: str, device: str) -> None:
    """Raises ValueError for a pinned kernel that is unknown or does not run on this kind of device."""
    names = [kernel.name for kernel in covering("causal") if device in kernel.devices]
    if name and name not in names:
        raise ValueError(
            f"kernel={name!r} is no attention kernel for device={device!r}: choose one of "
            f"{', '.join(names)}, or leave it out to have one chosen"
        )


def check_task(task: TrainingTask, cp: int, device: str) -> None:
    """What every door asks of the model, its pattern and its data before workers start. Raises ValueError."""
    check_vocabulary(parts_of(task.model, task.step), task.data)  # which may have been made of a dataset since
    check_buildable(task)
    check_own_optimizer(task)
    check_linears(task)
    check_layers(task)
    layouts = Layouts(task)
    layouts.choice(cp, device)
    if device == "cuda":
        check_pattern(task, cp, layouts)
    check_rows(task)
    check_portable(task)


def check_portable(task: TrainingTask) -> None:
    """Raises ValueError for a task that cannot be sent to workers."""
    try:
        ray.cloudpickle.dumps(task)
    except Exception as error:
        raise ValueError(
            f"the model, loss, optimizer, data or initial cannot be sent to workers ({type(error).__name__}: {error}): "
            "give functions and classes of a module, or plain objects, without open files, locks or threads in them"
        ) from error


def training_order(task: TrainingTask) -> SampleOrder:
    """Which sequences each step uses. Raises ValueError for a corpus that is unreadable or smaller than one batch."""
    training, _ = hold_out(at_submission(lambda: open_source(task.data)), num_sequences=task.num_held_out)
    return order_of(training, task.step.seed, task.step.global_batch)


def _with_sources(sets: Mapping[str, ValidationSet], context_tokens: int) -> dict[str, ValidationSet]:
    """With datasets as sources."""
    has_data = {name for name, one in sets.items() if getattr(one, "data", None) is not None}
    return {
        name: replace(one, data=as_source(one.data, context_tokens)) if name in has_data else one
        for name, one in sets.items()
    }


def fingerprint_of(task: TrainingTask) -> str:
    """The fingerprint of the training data and all validation sets, as each worker computes it. Raises ValueError for
    sets that cannot be computed."""
    opened = open_sets(task.validation)
    source, fingerprint = fingerprinted(task.data)
    _, held = hold_out(source, num_sequences=task.num_held_out)
    ValidationSource(task.validation, held, {name: one for name, (one, _) in opened.items()})
    return with_sets(fingerprint, opened)


def _recorded(path: Path) -> dict[str, Any] | None:
    """The content of a config.json; None where there is none. Raises RecordDamaged."""
    found = read_json(path)
    if found is not None and not _is_settings(found):
        raise errors.RecordDamaged(f"{path} is no record of a run's settings", path=str(path))
    return found


def _is_settings(found: Mapping[str, Any]) -> bool:
    """Whether what a submission reads of a config.json is there and is text."""
    run, files = found.get("run"), found.get("files", [])
    texts = [found.get("identity", {}), found.get("places", {})]
    return (
        isinstance(run, dict)
        and "name" in run
        and "digest" in found
        and all(isinstance(one, dict) and all(isinstance(text, str) for text in one.values()) for one in texts)
        and isinstance(files, list)
        and all(isinstance(one, list) and [type(text) for text in one] == [str, str] for one in files)
    )
