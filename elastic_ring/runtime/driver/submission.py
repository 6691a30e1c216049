"""A submission: reads the run that exists under its name, acts on `submission_rules`, and writes the record.

Following the run is `follow`'s part. No decision about training belongs here.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ray

from elastic_ring.config import RunConfig, ScalingConfig, StepConfig, check_copies, check_lasting, digest
from elastic_ring.data.filesystem import at_submission
from elastic_ring.data.preparation.materialise import DatasetTokens, materialised
from elastic_ring.data.prepared import may_grow, versions_beside, with_versions
from elastic_ring.data.sampling.validation import of_set
from elastic_ring.data.source import open_source
from elastic_ring.errors import CheckpointDamaged, CoordinatorLost, RecordDamaged, RunFailed
from elastic_ring.files import few, plain_json, replace_file, shown_plain
from elastic_ring.mesh import Mesh
from elastic_ring.monitor.goodput import Stages
from elastic_ring.monitor.json_files import read_json, set_aside
from elastic_ring.monitor.metrics import CONFIG_NAME, storage_error, write_json
from elastic_ring.runtime import run_storage
from elastic_ring.runtime.agent import notices
from elastic_ring.runtime.code_digest import code_digest
from elastic_ring.runtime.coordinator.actor import Coordinator
from elastic_ring.runtime.coordinator.resume import Resume, find_resume
from elastic_ring.runtime.coordinator.run_spec import RunSpec, is_finished, summary_of
from elastic_ring.runtime.driver import attach
from elastic_ring.runtime.driver import submission_rules as rules
from elastic_ring.runtime.driver.cluster import NAMESPACE, actor_name, live_nodes, worker_environment_of
from elastic_ring.runtime.driver.ray_session import cluster
from elastic_ring.runtime.driver.room import room, with_settled_copies
from elastic_ring.runtime.driver.task_checks import check_shadows, check_task, fingerprint_of, training_order
from elastic_ring.runtime.identity import NUM_SHOWN, ContentDigests, Identity, code_parts, describe, identity_of
from elastic_ring.runtime.ray_head import ON_HEAD
from elastic_ring.runtime.run_storage import check_writable
from elastic_ring.runtime.worker.env_fingerprint import versions
from elastic_ring.state.checkpoints.manifest import located
from elastic_ring.state.checkpoints.stored_weights import RunWeights
from elastic_ring.state.checkpoints.weight_files import are_there
from elastic_ring.state.storage.folder import Storage, open_or_refuse
from elastic_ring.train.task import TrainingTask, description_of
from elastic_ring.train.wrap import num_parameters

log = logging.getLogger(__name__)


def read_record(folder: Path) -> rules.RunRecord | None:
    """The record of the run in this folder; None where there is none. Raises RecordDamaged."""
    config = read_json(folder / CONFIG_NAME)
    return None if config is None else rules.RunRecord.of(config, str(folder / CONFIG_NAME))


def refuse(refusal: rules.Decision) -> None:
    """Raises ValueError for a decision that is a refusal."""
    if isinstance(refusal, rules.Refuse):
        raise ValueError(str(refusal))


def has_weights(run: RunConfig) -> bool:
    """Whether the weights that a summary names are there: a file alone may be anybody's, or a copy. Raises
    StorageFailed."""
    return are_there(Storage(run.storage_uri, timeout_s=run.timeouts.storage_s))


def run_from(path: str, run: RunConfig | None) -> RunConfig:
    """The settings of a run that begins at `path`, which leads to a run or to one of its checkpoints: `run` with that
    beginning, or the run there under its own name."""
    if run is not None:
        return replace(run, resume=path)
    storage, _ = located("", path.rstrip("/"))
    parent, _, name = (storage or path.rstrip("/")).rpartition("/")
    return RunConfig(name=name, storage_path=parent, resume=path if storage else "auto")


@dataclass(frozen=True)
class Submission:
    """The run as a trainer asks for it. `attempt` is this submission's id."""

    run: RunConfig
    scaling: ScalingConfig
    task: TrainingTask
    contents: ContentDigests
    attempt: str = ""
    config_files: Mapping[str, str] = field(default_factory=dict)
    """Name → text of files written next to config.json."""
    planned: Mapping[str, float] = field(default_factory=dict)
    """As `ElasticRingTrainer.planned`."""
    sources: Mapping[str, str] = field(default_factory=dict)
    stages: Stages = field(default_factory=lambda: Stages("process, imports, settings"))

    def with_code(self) -> Submission:
        """With the digests of the user's code that decides what is trained, as its files are now. An edit between a
        module's import and this call is taken for what runs."""
        digests = {name: code_digest(part) for name, part in code_parts(self.task, decides=True).items()}
        return replace(self, sources={name: digest for name, digest in digests.items() if digest})

    # ------------------------------------------------------------ what is requested

    @cached_property
    def identity(self) -> Identity:
        """The identity of this run. Raises ValueError for data that cannot be read."""
        task = self.task
        settings = {name: getattr(task.step, name) for name in StepConfig.IDENTITY}
        settings["num_val_sequences"] = task.num_held_out
        code = {name: describe(part) for name, part in code_parts(task, decides=True).items()}
        return identity_of(task, settings, code, self.contents.of(task.data)[0])

    @property
    def places(self) -> dict[str, str]:
        return {**self.identity.places, "run": self.run.storage_uri}

    @property
    def validation_contents(self) -> list[tuple[str, float, int | None, str]]:
        """Name, weight, number and contents of each validation set, wherever these lie."""
        sets = []
        for name, entry in sorted(self.task.validation.items()):
            contents = ""
            if entry.data is not None:
                with of_set(name):
                    contents, _ = self.contents.of(entry.data)
            sets.append((name, entry.weight, entry.num_sequences, contents))
        return sets

    @property
    def digest(self) -> str:
        """The digest of all settings that a submission shares with the running run that it attaches to."""
        task = self.task
        # Unset settings are left out, so that the digests of runs without them stay the same.
        more = [] if task.pattern is None else [task.pattern.identity]
        more += [] if task.cost_model is None else [repr(task.cost_model)]
        more += [str(self.validation_contents)] if task.validation else []
        usual = {("kv_wire", "native"), ("experts", "auto"), ("linears", "native"), ("val_every_tokens", 0)}
        usual_optim = {("replanned", ()), ("optimizer", "adamw")}
        return digest(
            replace(self.scaling, keep_activations="auto"),  # bits do not depend on it
            {name: value for name, value in vars(task.step).items() if (name, value) not in usual},
            {name: value for name, value in vars(task.optim).items() if (name, value) not in usual_optim},
            self.identity.entries["data"],
            [str(fault) for fault in self.run.faults],
            [describe(part) for part in code_parts(task).values()],
            *more,
        )

    def request(self, *, with_digest: bool = False) -> rules.RunRequest:
        files = self.contents.of(self.task.data)[1]
        plans = self.task.optim.plans
        return rules.RunRequest(
            self.run,
            self.identity,
            self.digest if with_digest else "",
            self.sources,
            files,
            plans,
            self.task.asks_callbacks,
        )

    def find_resume(self) -> Resume:
        """Where this submission begins. Raises ValueError if the run cannot be resumed, or a later manifest has
        changed; StorageFailed."""
        try:
            resume = find_resume(self.run, self.identity, grows=may_grow(self.task.data))
        except CheckpointDamaged as error:
            raise ValueError(f"resume={self.run.resume!r}: {error}") from error
        if resume.corpus:  # its manifests lie beside the first one, also where that has moved
            resume = replace(resume, corpus=versions_beside(self.task.data, resume.corpus))
            at_submission(lambda: open_source(with_versions(self.task.data, resume.corpus)))
        return resume

    def recorded_pass(self) -> int | None:
        """The sequences of a pass of the run on record: by its config.json, else by the checkpoint it goes on from; 1
        where neither says. None for a new run. Raises as `find_resume`."""
        record, resume = None, self.find_resume()
        with suppress(RecordDamaged):  # `finished_summary` has reported it
            record = read_record(self.run.driver_folder)
        if record is None and not resume.checkpoints:
            return None
        number = resume.sequences_per_pass if record is None else record.sequences_per_pass
        return number if type(number) is int and 1 <= number <= self.task.step.global_batch else 1

    # ------------------------------------------------------------ before Ray

    def with_datasets_written(self) -> Submission:
        """With each dataset written out beside the run's folder, as a corpus."""

        def corpus_of(data: Any, name: str) -> Any:
            uri = f"{self.run.storage_uri}-data{name}"
            return materialised(data, uri, cluster) if isinstance(data, DatasetTokens) else data

        check_lasting(self.run.driver_folder)
        sets = {
            name: replace(entry, data=corpus_of(entry.data, f"-{name}")) for name, entry in self.task.validation.items()
        }
        return replace(self, task=replace(self.task, data=corpus_of(self.task.data, ""), validation=sets))

    def fetch_records(self) -> None:
        """Bring a run's records here from its object store. Raises ValueError where it cannot be asked."""
        if self.run.is_remote:
            open_or_refuse(self.run.storage_uri, write=False, timeout_s=self.run.timeouts.storage_s)
            run_storage.fetch(self.run, self.run.driver_folder)

    def finished_summary(self) -> dict[str, Any] | None:
        """The summary of an earlier submission that did all steps, else None. Raises ValueError for a run that this
        submission may not continue."""
        run, folder, steps = self.run, self.run.driver_folder, self.task.step.steps
        try:
            record = read_record(folder)
        except RecordDamaged as error:
            log.warning("%s: compares the settings with the run's checkpoints", error)
            record = None
        of_record = self.identity.digest if record is None else record.identity.digest
        is_whole = is_finished(run, folder, steps, of_record)
        contents = None if record is None else record.identity.entries.get("data")
        if record and contents and is_whole and record.data == description_of(self.task)["data"]:
            self.contents.take_recorded(self.task.data, contents)
        existing = rules.ExistingRun(record, is_whole)
        request = self.request()
        refuse(rules.decide_submission(existing, request))
        if changed := rules.changed_code(existing, request):
            result = "its result is still that of the code before" if is_whole else "it goes on with the new code"
            log.warning("run %s: the code of %s has changed; %s", run.name, ", ".join(changed), result)
        if not is_whole:
            return None
        if record is not None:
            self._log_moved()
        refuse(rules.decide_submission(replace(existing, has_weights=has_weights(run)), request))
        return summary_of(folder, of_record)

    def check(self) -> str:
        """Check everything that needs no cluster; returns the fingerprint of the data. Raises ValueError."""
        check_shadows(Path.cwd(), sys.modules)
        fingerprint = at_submission(lambda: fingerprint_of(self.task), self.run.timeouts.storage_s)
        training_order(self.task)
        check_writable(self.run.driver_folder, holds_run=not self.run.is_remote)
        self.find_resume()
        check_task(self.task, self.scaling.cp, self.scaling.device)
        if self.run.notices:
            notices.find(self.run.notices)
        return fingerprint

    # ------------------------------------------------------------ in a Ray session

    def find_or_start(self, fingerprint: str) -> Any | None:
        """The run's coordinator, found or created; None when the run has succeeded since this submission began.

        Raises: ValueError for a run that runs otherwise, and when the cluster cannot hold the mesh.
        """
        coordinator, is_own = self._find_or_start(fingerprint)
        if coordinator is None:
            return None
        folder, record = self.run.driver_folder, None
        with suppress(RecordDamaged):
            record = read_record(folder)
        if record and (other := rules.other_versions(record.versions, versions(self.scaling.device))):
            log.warning("run %s was recorded with other versions than this submission's: %s", self.run.name, other)
        # The submission that created the coordinator may have died before it wrote the config.
        if is_own or (folder.is_dir() and not (folder / CONFIG_NAME).exists()):
            try:
                self.write_record()
            except OSError as error:
                reason = storage_error(folder, error)
                if is_own:
                    coordinator.abandon.remote(reason)
                raise RunFailed(reason) from error
        return coordinator

    def _find_or_start(self, fingerprint: str) -> tuple[Any | None, bool]:
        """(coordinator as in `find_or_start`, whether this submission created it)."""
        run, request = self.run, self.request(with_digest=True)
        while True:
            handle = attach.find(run.name)
            answer = None if handle is None else attach.ask(handle, run)
            if answer is not None and answer.folder != run.storage_uri:
                answer = replace(answer, writes_here=attach.has_records_of(run, answer.attempt))
            existing = rules.ExistingRun(coordinator=answer)
            outcome = rules.decide_submission(existing, request)
            refuse(outcome)
            if answer is not None and isinstance(outcome, rules.Attach):
                running = run if answer.has_ended or answer.run is None else answer.run
                changes, kept = rules.live_changes(running, run)
                if changes and handle is not None:
                    ray.get(handle.save_as.remote(run.checkpoint_config), timeout=run.timeouts.hello_s)
                texts = [f"; it takes over {', '.join(changes)}"] * bool(changes)
                texts += [f"; it does not take over {few(kept, NUM_SHOWN)}: for that, stop it first"] * bool(kept)
                log.log(logging.WARNING if kept else logging.INFO, "attached to run %s%s", run.name, "".join(texts))
                self.identity.log_moved(run.name, answer.identity.places)
                return handle, False
            if answer is not None:
                log.info("an earlier attempt of run %s has ended (%s): starting anew", run.name, answer.error)
                if not attach.remove(handle, run):
                    raise CoordinatorLost(f"the ended coordinator of run {run.name} keeps its name")
            # A coordinator writes the summary before it exits: without one, it is gone for another reason.
            if is_finished(run, run.driver_folder, self.task.step.steps, self.identity.digest):
                return None, False
            refuse(rules.decide_submission(rules.ExistingRun(other_writer=attach.other_writer(run)), request))
            coordinator = self._start(fingerprint, request.digest)
            if attach.attempt_of(coordinator, run, starts=True) == self.attempt:
                return coordinator, True
            # Another submission has won: this one follows it if its settings agree.

    def _start(self, fingerprint: str, digest: str) -> Any:
        """Create the coordinator, unless another submission has meanwhile."""
        start_dp = room(self.scaling, self.run.name)
        mesh = Mesh(start_dp or self.scaling.dp, self.scaling.cp)
        check_copies(mesh, self.run.copies)
        run = replace(self.run, env=worker_environment_of(self.run, self.scaling.device))
        run = with_settled_copies(run, mesh, num_parameters(self.task), live_nodes(self.scaling))
        resume = self.find_resume()
        for reason in resume.damaged.values():
            log.warning("set aside: %s", reason)
        if resume.checkpoints:
            log.info("run %s resumes at step %d from %s", run.name, resume.step, resume.resumed_from[-1]["path"])
        self._log_moved(resume.places)
        self.stages.begin("")
        run_spec = RunSpec(
            run,
            self.scaling,
            self.task,
            self.attempt,
            digest,
            fingerprint,
            self.identity,
            resume,
            start_dp,
            self.planned,
            tuple(self.stages.ended),
            self.sources,
            next(reversed(attach.begun_by(run)), ""),
        )
        return (
            ray.remote(Coordinator)
            .options(
                name=actor_name(run.name, "coordinator"),
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

    def _log_moved(self, before: Mapping[str, str] = MappingProxyType({})) -> None:
        """Logs where the run's record, or else the checkpoint where it begins, has other places."""
        with suppress(RecordDamaged):
            record = read_record(self.run.driver_folder)
            before = {**before, **(record.identity.places if record else {})}
        replace(self.identity, places=self.places).log_moved(self.run.name, before)

    # ------------------------------------------------------------ the record

    def write_record(self) -> None:
        folder = self.run.driver_folder
        folder.mkdir(0o700, parents=True, exist_ok=True)
        for name, text in self.config_files.items():
            replace_file(folder / name, text.encode())
        try:
            read_record(folder)
        except RecordDamaged as error:
            log.info("%s", set_aside(folder / CONFIG_NAME, error.message))  # `finished_summary` has reported it
        write_json(folder / CONFIG_NAME, self.settings_record(), durable=True)
        run_storage.publish(self.run, folder)

    def settings_record(self) -> dict[str, Any]:
        settings = {"scaling": self.scaling, "step": self.task.step, "optim": self.task.optim, "run": self.run}
        texts = {name: json.dumps(vars(value), default=str) for name, value in settings.items()}
        shown = {name: shown_plain(plain_json(text)) for name, text in texts.items()}
        shown["run"]["env"] = sorted(self.run.env)  # values may be secrets
        return {
            "digest": self.digest,
            "identity": dict(self.identity.entries),
            "places": self.places,
            "files": self.contents.of(self.task.data)[1],
            **shown,
            **description_of(self.task),
            "code": {name: describe(part) for name, part in code_parts(self.task).items()},
            "sources": dict(self.sources),
            **({"from": self.task.initial.record} if isinstance(self.task.initial, RunWeights) else {}),
            **({} if self.task.cost_model is None else {"cost_model": str(self.task.cost_model)}),
            **{f"planned_{name}": value for name, value in self.planned.items()},
            "versions": versions(self.scaling.device),
        }
