"""The public entry point: `ElasticRingTrainer(...).fit() -> Result`, after Ray Train's conventions.

It holds the settings; `runtime.driver` checks them, finds or starts the run's coordinator, and follows it. It keeps no
training state: if the driver dies, start it again under the same run name within the lease and it attaches to the same
run. No training and no recovery decision belongs here.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from torch import nn

from elastic_ring.attention.patterns.layers import LayerPatterns
from elastic_ring.config import OptimConfig, RunConfig, ScalingConfig, StepConfig
from elastic_ring.costs import CostModel
from elastic_ring.data.sampling.validation import ValidationSet
from elastic_ring.data.source import SourceConfig
from elastic_ring.forecast.pass_choice import AS_SET, AUTO, choose_pass
from elastic_ring.monitor.callbacks import Callback
from elastic_ring.monitor.result import Result
from elastic_ring.runtime.driver.follow import Follower
from elastic_ring.runtime.driver.ray_session import gpu_of_run, ray_session
from elastic_ring.runtime.driver.submission import Submission, run_from
from elastic_ring.runtime.driver.task_checks import build_task, check_settings
from elastic_ring.runtime.identity import ContentDigests
from elastic_ring.train.optim import OptimizerFactory, Schedule
from elastic_ring.train.task import Initial, LossFunction, density_of, parts_of

log = logging.getLogger(__name__)


class ElasticRingTrainer:
    """Trains `model()` on `data` over rings that may lose and gain workers.

    Args:
        model: builds the module, which must call `batch.attention` for its attention.
        data: a source of packed sequences (`PreparedTokens`, `StdlibText`, `TextFiles`, `TokenShards`, or your own),
            or a `ray.data.Dataset` or `datasets.Dataset` with a column `text`, which `fit` writes out and prepares
            beside the run's folder (`DatasetTokens` for conversations, other columns and tokenizers).
        loss: (model, batch) -> (sum over this slice's targets, number of targets); by default next-token cross-entropy.
        scaling_config, run_config, step_config, optim_config: settings; see their classes.
        optimizer: "muon", "adamw", or named local shards -> optimizer; by default as `optim_config` says.
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
        optimizer: OptimizerFactory | Literal["adamw", "muon"] | None = None,
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
        self.task = build_task(
            model,
            data,
            step,
            optim=optim_config,
            pattern=pattern,
            cost_model=cost_model,
            validation=validation or {},
            callbacks=callbacks,
            loss=loss,
            optimizer=optimizer,
            initial=initial,
            units=units,
            metrics=metrics and dict(metrics),
            lr_schedule=lr_schedule,
        )
        self.callbacks = tuple(callbacks)
        self.scaling_config = scaling_config or ScalingConfig()
        self.run_config = run_config or RunConfig()
        self.config_files = dict(parts_of(model, step).files)  # name -> text of files written next to config.json
        self.planned: dict[str, float] = {}  # step_s, gpu_bytes of a rank, goodput
        self._contents = ContentDigests()
        check_settings(self.task, self.scaling_config, self.run_config)

    @classmethod
    def restore(cls, path: str, model: Callable[[], nn.Module], data: SourceConfig, **settings: Any) -> Self:
        """A trainer whose run begins at a checkpoint: `path` leads to a run, or to one of its checkpoints.

        The other arguments are the trainer's. A `run_config` keeps its own name and storage; without one the
        run goes on under its name in its storage. Raises ValueError as the constructor does.
        """
        run = run_from(path, settings.pop("run_config", None))
        return cls(model, data, run_config=run, **settings)

    def submission(self) -> Submission:
        """The run as this trainer asks for it now."""
        return Submission(
            self.run_config,
            self.scaling_config,
            self.task,
            self._contents,
            secrets.token_hex(8),
            self.config_files,
            self.planned,
        )

    @property
    def measured_on(self) -> dict[str, str]:
        """Contents of the model, the data and the validation sets: runs that share them have comparable losses."""
        submission = self.submission()
        return {**submission.identity.entries, "validation": str(submission.validation_contents)}

    def fit(self) -> Result:
        """Train to the last step, recovering from failures on the way. Blocks.

        Raises: ValueError for settings that the data or the cluster rules out; a class of `elastic_ring.errors` when
        the run fails; KeyboardInterrupt after Ctrl-C or a stop signal, once the run's actors are removed (its
        message says what is left).
        """
        submission = self.submission().with_code()  # before anybody edits a file
        submission.stages.begin("checks the data and the model")
        submission = submission.with_datasets_written()
        self.task = submission.task
        submission.fetch_records()
        result = Follower(submission, self.callbacks).finished()
        if result is not None:
            return result
        fingerprint = submission.check()
        submission.stages.begin("starts Ray, or finds it")
        with ray_session(self.scaling_config, self.run_config.timeouts.lease_s):
            self.gpu = gpu_of_run(self.scaling_config)
            self.choose_pass(self.gpu)
            if self.forecast is not None:
                self.planned = self.forecast()
            submission.stages.begin("looks for the run and for room")
            submission = replace(submission, task=self.task, scaling=self.scaling_config, planned=self.planned)
            return Follower(submission, self.callbacks).follow(fingerprint)

    def choose_pass(self, gpu: str | None) -> None:
        """Resolve "auto" of `sequences_per_pass` and `keep_activations` for GPUs of this type, None for an unknown one.

        A run on record keeps its number. Raises as `Submission.find_resume`.
        """
        step, scaling, pattern = self.task.step, self.scaling_config, self.task.pattern
        if AUTO not in (step.sequences_per_pass, scaling.keep_activations):
            return
        density, number = 1.0, None
        if step.sequences_per_pass == AUTO and self.run_config.resume != "never":
            number = self.submission().recorded_pass()
            step = step if number is None else replace(step, sequences_per_pass=number)
        parts = parts_of(self.task.model, step)
        sizes = parts.sizes if self.task.loss is parts.loss else None
        if pattern is not None and sizes is not None:
            density = density_of(pattern, sizes.config, step)
        choice = choose_pass(sizes, scaling, step, self.run_config, gpu, density)
        log.info("%s", choice.reason if number is None else choice.reason.replace(AS_SET, "as on record of this run"))
        step, self.scaling_config = choice.settings(step, scaling)
        self.task = replace(self.task, step=step)
