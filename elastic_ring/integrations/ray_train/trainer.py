"""`Zero3Trainer(...).fit() -> Result`: Ray Train's TorchTrainer over DeepSpeed ZeRO-3, with ring attention inside.

It checks every setting, starts an actor for the records and hands the run to Ray Train, whose controller starts,
watches and replaces the worker group. Nothing here recovers anything.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import textwrap
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from typing import Any, Literal

import ray
import ray.train
from ray.exceptions import GetTimeoutError, RayError
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import nn

from elastic_ring.config import OptimConfig, RunConfig, ScalingConfig, StepConfig, check_lasting, check_loss_spikes
from elastic_ring.data.packing import Files
from elastic_ring.data.source import SourceConfig, open_source
from elastic_ring.errors import RunFailed
from elastic_ring.files import replace_file
from elastic_ring.integrations.ray_train import ops
from elastic_ring.integrations.ray_train.rings import DatasetRows
from elastic_ring.integrations.ray_train.run_records import Records
from elastic_ring.integrations.ray_train.settings import Zero3Config, check_mesh
from elastic_ring.integrations.ray_train.worker import DATASET, Job, Zero3Worker, train_worker
from elastic_ring.monitor.metrics import CONFIG_NAME, write_json
from elastic_ring.monitor.progress import ProgressLine
from elastic_ring.monitor.result import Result
from elastic_ring.runtime.coordinator.run_spec import summary_of
from elastic_ring.runtime.driver.follow import FOLLOW_S
from elastic_ring.runtime.driver.ray_session import cluster
from elastic_ring.runtime.driver.submission import has_weights, read_record, refuse
from elastic_ring.runtime.driver.submission_rules import ExistingRun, RunRequest, decide_submission
from elastic_ring.runtime.driver.task_checks import check_task, training_order
from elastic_ring.runtime.groups import nccl
from elastic_ring.runtime.identity import Identity, contents_of, describe, identity_of
from elastic_ring.runtime.run_storage import check_writable
from elastic_ring.runtime.worker.env_fingerprint import versions
from elastic_ring.train.startup.check import ModelRefused
from elastic_ring.train.task import description_of
from elastic_ring.trainer import ElasticRingTrainer

log = logging.getLogger(__name__)

# NCCL's own watchdog stays on: nothing else ends a worker group that hangs.
GPU_ENVIRONMENT = {name: value for name, value in nccl.ENVIRONMENT.items() if not name.startswith("TORCH_NCCL_")}
RAY_DATASET = "a Ray dataset"
NUM_KEPT = 2
DATA_CPUS = 2
NUM_CHARACTERS = 200  # of an error, in the records


class Zero3Trainer:
    """Trains `model()` with DeepSpeed ZeRO-3 over all workers, in rings of `cp` of them.

    Args:
        model, data, step_config, optim_config, settings: as of `ElasticRingTrainer`, whose samples, loss, optimizer and
            patterns these are; without validation.
        cp: ranks of a ring, over which a sequence is split.
        scaling_config: Ray Train's; `num_workers=(min, max)` lets Ray Train change their number between checkpoints.
        run_config: Ray Train's; name, storage_path and failure_config are used as they are.
        zero: offloading, checkpoints and DeepSpeed's own configuration.
        dataset: a `ray.data.Dataset` with documents as lists of tokens in column `tokens`, in place of `data`.
        vocab_size, end_of_document: of its tokens; needed with `dataset`.
        train_loop: a loop of one's own in place of `ray_train.train`.

    Raises: ValueError for settings that cannot work, before anything is started.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        data: SourceConfig | None = None,
        *,
        cp: int = 1,
        scaling_config: ray.train.ScalingConfig | None = None,
        run_config: ray.train.RunConfig | None = None,
        zero: Zero3Config | None = None,
        step_config: StepConfig | None = None,
        optim_config: OptimConfig | None = None,
        dataset: Any = None,
        vocab_size: int | None = None,
        end_of_document: int | None = None,
        train_loop: Callable[[Zero3Worker], None] | None = None,
        **settings: Any,
    ) -> None:
        step = step_config or StepConfig()
        self.zero = zero or Zero3Config()
        self.scaling_config = scaling_config or ray.train.ScalingConfig(num_workers=cp)
        self.run_config = run_config or ray.train.RunConfig()
        num_workers = self.scaling_config.num_workers
        self.num_workers = (num_workers, num_workers) if isinstance(num_workers, int) else tuple(num_workers)
        self.cp, self.dataset, self.train_loop = cp, dataset, train_loop
        self.vocab_size, self.end_of_document = vocab_size, end_of_document
        check_mesh(self.num_workers, cp, step, self.zero)
        if step.sequences_per_pass == "auto":
            step = replace(step, sequences_per_pass=1)
            log.info("one sequence a pass: ZeRO-3 in Ray Train computes one at a time")
        if step.validates:
            raise ValueError(
                f"val_every_steps={step.val_every_steps}, val_every_tokens={step.val_every_tokens}: ZeRO-3 in Ray "
                "Train does not validate; set both to 0, or validate the weights afterwards"
            )
        if step.linears != "native":
            raise ValueError(
                f"linears={step.linears!r}: ZeRO-3 in Ray Train multiplies in param_dtype; leave it out, or use "
                "ElasticRingTrainer"
            )
        if settings.get("callbacks"):
            raise ValueError("callbacks: ZeRO-3 in Ray Train calls none; give ray.train.RunConfig(callbacks=[...])")
        if isinstance(run_config, RunConfig):
            raise ValueError(
                "run_config is the elastic ring's: give a ray.train.RunConfig; loss_spike and "
                "loss_spike_actions are settings of Zero3Config"
            )
        _check_dataset(data, dataset, vocab_size, end_of_document)
        self.device: Literal["cpu", "cuda"] = "cuda" if self.scaling_config.use_gpu else "cpu"
        base = ElasticRingTrainer(
            model,
            data or DatasetRows.of(step, vocab_size or 0),
            step_config=step,
            optim_config=optim_config,
            scaling_config=ScalingConfig(dp=1, cp=cp, spares=0, device=self.device),
            **settings,
        )
        self.task = base.task
        ops.check_no_experts(self.task.model)
        refused = {"lora": self.task.frozen is not None, "optimizer='muon'": self.task.optim.optimizer == "muon"}
        for name in (name for name, is_set in refused.items() if is_set):
            raise ValueError(
                f"{name}: ZeRO-3 in Ray Train trains whole models; leave it out, or use ElasticRingTrainer"
            )
        check_loss_spikes(
            RunConfig(loss_spike=self.zero.loss_spike, loss_spike_actions=self.zero.loss_spike_actions), self.task.optim
        )
        self.config_files = base.config_files
        # The name and folder have the elastic ring's rules.
        self._run = RunConfig(name=self.run_config.name, storage_path=self.run_config.storage_path)

    def fit(self) -> Result:
        """Train to the last step; Ray Train starts lost workers again. Blocks.

        Raises: ValueError for what cannot work; RunFailed once Ray Train has given up.
        """
        ops.check_installed()
        check_lasting(self._run.driver_folder)
        storage_uri = self._run.storage_uri if self._run.is_remote else ""
        if (summary := self._finished()) is not None:
            return Result(summary, self._run.driver_folder, storage_uri=storage_uri)
        self._check()
        write_json(self._run.driver_folder / CONFIG_NAME, self._config())
        for name, text in self.config_files.items():
            replace_file(self._run.driver_folder / name, text.encode())
        # For a cluster of one's own, where none is there yet; Ray Data needs some beside the workers.
        each = (self.scaling_config.resources_per_worker or {}).get("CPU", 1.0)
        num_cpus = max(1, math.ceil(each * self.num_workers[1])) + (0 if self.dataset is None else DATA_CPUS)
        with cluster(num_cpus, self._run.timeouts.lease_s):
            return Result(self._fit(), self._run.driver_folder, storage_uri=storage_uri)

    # ------------------------------------------------------------ before workers start

    def _check(self) -> None:
        folder = self._run.driver_folder
        if not (folder / CONFIG_NAME).exists():
            check_writable(folder)
        folder.mkdir(0o700, parents=True, exist_ok=True)
        check_task(self.task, self.cp, self.device)
        if self.dataset is None:
            log.info("data %s", open_source(self.task.data).fingerprint[:16])
            training_order(self.task)
        if "optimizer" in self.zero.deepspeed:  # which may be one that DeepSpeed compiles
            ops.check_locks(ops.extensions_folder())
        ops.check_zero_settings(self.zero)
        if self.zero.uses_nvme:
            ops.check_swap_folder(self.zero.swap_folder)
            ops.load_async_io(ops.extensions_folder())

    @cached_property
    def _contents(self) -> tuple[str, Files]:
        return (RAY_DATASET, ()) if self.dataset is not None else contents_of(self.task.data)

    @cached_property
    def _identity(self) -> Identity:
        """What a submission shares with the run that it goes on with. Raises ValueError for data that cannot be read.
        A Ray dataset is read once, by the workers: what it holds is not known."""
        task = self.task
        step = {name: getattr(task.step, name) for name in StepConfig.IDENTITY}
        parts = {name: describe(getattr(task, name)) for name in ("model", "loss", "initial")}
        return identity_of(task, step, parts, self._contents[0])

    def _config(self) -> dict[str, Any]:
        """The settings as config.json records them, under the names of the elastic ring's where it has them, too."""
        settings = {"step": self.task.step, "optim": self.task.optim, "zero": self.zero}
        plain = {name: json.loads(json.dumps(vars(value), default=str)) for name, value in settings.items()}
        own, description = self._identity, description_of(self.task)
        if self.dataset is not None:
            del description["data"]
        return {
            "run": {"name": self._run.name},
            "digest": own.digest,
            "identity": dict(own.entries),
            "places": dict(own.places),
            "files": self._contents[1],
            **plain,
            **description,
            "cp": self.cp,
            "versions": {**versions(self.device), "deepspeed": version("deepspeed")},
        }

    def _finished(self) -> dict[str, object] | None:
        """The summary of an earlier submission that has all steps. Raises ValueError if its settings differ."""
        folder = self._run.driver_folder
        record = read_record(folder)
        if record is None:
            return None
        request = RunRequest(self._run, self._identity, files=self._contents[1], can_extend=False)
        refuse(decide_submission(ExistingRun(record), request))
        self._identity.log_moved(self._run.name, record.identity.places)
        summary = summary_of(folder, self._identity.digest)
        if summary.get("steps", -1) < self.task.step.steps:
            return None
        refuse(decide_submission(ExistingRun(is_whole=True, has_weights=has_weights(self._run)), request))
        ProgressLine(sys.stderr, 0).note(f"run {self._run.name} is finished already; its summary is in {folder}")
        return summary

    # ------------------------------------------------------------ the run

    def _fit(self) -> dict[str, object]:
        """Train with Ray Train; returns the summary."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        keeper: Any = ray.remote(num_cpus=0)(Records).options(scheduling_strategy=here)
        records = keeper.remote(self._run.driver_folder)
        job = Job(
            task=self.task,
            zero=self.zero,
            cp=self.cp,
            device=self.device,
            name=self._run.name,
            storage_uri=self._run.storage_uri,
            records=records,
            loop=self.train_loop,
            vocab_size=self.vocab_size if self.dataset is not None else None,
            end_of_document=self.end_of_document or 0,
        )
        env = dict(self.run_config.worker_runtime_env or {})
        env["env_vars"] = {
            "DS_ACCELERATOR": self.device,
            ops.FOLDER: str(ops.extensions_folder()),
            **(GPU_ENVIRONMENT if self.device == "cuda" else {}),
            **env.get("env_vars", {}),
        }
        trainer = TorchTrainer(
            train_worker,
            train_loop_config={"job": job},
            scaling_config=self.scaling_config,
            torch_config=TorchConfig(backend="gloo" if self.device == "cpu" else None),
            run_config=replace(
                self.run_config,
                name=self._run.name,
                storage_path=self._run.storage_path,
                callbacks=[*(self.run_config.callbacks or []), _NoteFailures(records)],
                worker_runtime_env=env,
            ),
            datasets=None if self.dataset is None else {DATASET: self.dataset},
        )
        has_ended = threading.Event()

        def news() -> Any:
            return ray.get(records.news.remote(), timeout=self._run.timeouts.report_s)

        console = threading.Thread(target=self._show, args=(news, has_ended), name="console", daemon=True)
        console.start()
        try:
            result = trainer.fit()
        except ray.train.TrainingFailedError as error:
            raise RunFailed(f"Ray Train gave up: {_last_line(error)}") from error
        finally:
            has_ended.set()
            console.join(self._run.timeouts.report_s)
        if (failure := ray.get(records.error.remote(), timeout=self._run.timeouts.report_s)) is not None:
            raise RunFailed(failure.message, **failure.facts) if isinstance(failure, ModelRefused) else failure
        log.info("Ray Train's folder is %s", result.path)
        return summary_of(self._run.driver_folder, self._identity.digest)

    def _show(self, news: Callable[[], Any], has_ended: threading.Event) -> None:
        """Show each step of this submission at most once, and a line for each recovery, on the console."""
        shown, num_lines, is_last = -1, -1, False
        with ProgressLine(sys.stderr, self.task.step.steps) as progress:
            while not is_last:
                is_last = has_ended.wait(FOLLOW_S)
                try:
                    begun_at, newest, lines = news()
                except GetTimeoutError:
                    continue
                except RayError as error:
                    log.warning("no more steps are shown: %s", error)
                    return
                if begun_at is None:  # all on record is of earlier submissions
                    continue
                if num_lines < 0:
                    shown, num_lines = begun_at - 1, len(lines)
                    progress.open(begun_at)
                for line in lines[num_lines:]:
                    progress.note(line)
                num_lines = len(lines)
                if newest is not None and newest.step > shown:
                    progress.step(newest)
                    shown = newest.step


def _check_dataset(data: object, dataset: object, vocab_size: int | None, end_of_document: int | None) -> None:
    """Raises ValueError for both or none of data and dataset, and for a dataset whose tokens are not described."""
    if (data is None) == (dataset is None):
        raise ValueError("give data (a corpus in the run's own order) or dataset (a Ray dataset), one of them")
    if vocab_size is None or end_of_document is None:
        if dataset is not None:
            raise ValueError(
                f"dataset with vocab_size={vocab_size}, end_of_document={end_of_document}: give both, as of its "
                "tokenizer"
            )
    elif not 0 <= end_of_document < vocab_size:
        raise ValueError(
            f"end_of_document={end_of_document} is no token of a vocabulary of vocab_size={vocab_size}: give both as "
            "of the dataset's tokenizer"
        )


def scaling_config(
    num_workers: tuple[int, int], resources_per_worker: Mapping[str, float], *, use_gpu: bool
) -> ray.train.ScalingConfig:
    """Ray Train's, for (fewest, most) workers."""
    fewest, most = num_workers
    return ray.train.ScalingConfig(
        num_workers=most if fewest == most else num_workers,
        use_gpu=use_gpu,
        resources_per_worker={**resources_per_worker, **({"GPU": 1} if use_gpu else {})},
    )


def run_config(name: str, storage_path: str, max_failures: int) -> ray.train.RunConfig:
    """Ray Train's, which keeps the newest checkpoints."""
    return ray.train.RunConfig(
        name=name,
        storage_path=storage_path,
        failure_config=ray.train.FailureConfig(max_failures=max_failures),
        checkpoint_config=ray.train.CheckpointConfig(num_to_keep=NUM_KEPT),
    )


class _NoteFailures(ray.train.UserCallback):
    """Notes each failure in the records, from Ray Train's controller."""

    def __init__(self, records: Any) -> None:
        self._records = records

    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
        causes = (f"rank {rank}: {_last_line(error)}" for rank, error in sorted(worker_exceptions.items()))
        self._records.failed.remote("; ".join(causes))


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return textwrap.shorten(lines[-1], NUM_CHARACTERS) if lines else type(error).__name__
