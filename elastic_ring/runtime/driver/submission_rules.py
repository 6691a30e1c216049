"""Decides what a submission does under a run's name: start, go on from a checkpoint, attach, return, or be refused.

Pure: the run as it exists and the run as requested go in, a decision comes out. No Ray, no storage and no clock here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_ring.config import RunConfig
from elastic_ring.errors import RecordDamaged
from elastic_ring.files import few
from elastic_ring.monitor.json_files import as_written
from elastic_ring.monitor.metrics import SUMMARY_NAME
from elastic_ring.runtime.code_digest import changed_parts
from elastic_ring.runtime.identity import NUM_SHOWN, Identity, changed_files

LIVE = ("checkpoint.every_steps", "checkpoint.every_s", "checkpoint.keep_last", "checkpoint.keep_every")
"""Settings that a run takes over from a submission that attaches."""
OF_SUBMISSION = [
    "name",
    "storage_path",
    "run_dir",
    "resume",
    "code_changed",
    "faults",
    "progress",
    "env",
    "checkpoint_config",
    "timeouts",
]
"""Those that other rules compare, that are one driver's or start's, and parts."""
Files = Sequence[Sequence[str]]
Plans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class RunRecord:
    """What a submission reads of a run's config.json."""

    name: str
    identity: Identity = field(default_factory=Identity)
    files: Files = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    """Digests of the code, by part."""
    plans: Plans = ()
    """As `OptimConfig.plans`; empty where the record has no schedule."""
    steps: int = 0
    data: Mapping[str, object] | None = None
    """The data's settings."""
    sequences_per_pass: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Mapping[str, Any], path: str) -> RunRecord:
        """Raises RecordDamaged for a content that no run writes."""
        with as_written(path):
            run, optim, step = config["run"], config.get("optim") or {}, config.get("step") or {}
            texts = [config.get(name, {}) for name in ("identity", "places")]
            files, edges = config.get("files", []), (0, *optim.get("replanned", ()), optim.get("total_steps", 0))
            if (
                not isinstance(run["name"], str)
                or "digest" not in config
                or not all(isinstance(text, str) for mapping in texts for text in mapping.values())
                or not all([type(text) for text in entry] == [str, str] for entry in files)
            ):
                raise RecordDamaged(f"{path} is no record of a run's settings", path=path)
            sources, versions = config.get("sources"), config.get("versions")
            return cls(
                run["name"],
                Identity(*texts),
                files,
                sources if isinstance(sources, dict) else {},
                list(zip(edges[::2], edges[1::2], strict=False)) if optim else (),
                int(step.get("steps", 0)),
                config.get("data"),
                step.get("sequences_per_pass"),
                versions if isinstance(versions, dict) else {},
            )


@dataclass(frozen=True)
class Coordinator:
    """The answer of a coordinator that has the run's name."""

    attempt: str
    digest: str
    identity: Identity
    sources: Mapping[str, str]
    folder: str
    has_ended: bool
    error: str
    """The class of the error with which the run has ended; empty for none."""
    asks_callbacks: bool
    head_is_kept: bool = False
    """Whether the cluster's head keeps its state when it dies."""
    pid: int = 0
    writes_here: bool = True
    """Whether the requested folder holds its records, maybe by another path."""
    run: RunConfig | None = None
    """Its settings, as it runs now."""


@dataclass(frozen=True)
class ExistingRun:
    """The run as it exists."""

    record: RunRecord | None = None
    is_whole: bool = False
    """Whether its folder has the summary of all requested steps."""
    has_weights: bool = True
    coordinator: Coordinator | None = None
    other_writer: str | None = None
    """The run that another cluster writes into the requested folder."""
    has_checkpoint: bool = False

    @property
    def live(self) -> Coordinator | None:
        """The coordinator that can be followed: of a run that trains, or has ended well."""
        return None if self.coordinator is None or self.coordinator.error else self.coordinator

    @property
    def running(self) -> Coordinator | None:
        return None if self.coordinator is None or self.coordinator.has_ended else self.coordinator


@dataclass(frozen=True)
class RunRequest:
    """The run as requested. `digest`: of all settings that a running run must share."""

    run: RunConfig
    identity: Identity
    digest: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    files: Files = ()
    plans: Plans = ()
    asks_callbacks: bool = False
    can_extend: bool = True


@dataclass(frozen=True)
class Start:
    """Start at step 0."""


@dataclass(frozen=True)
class Resume:
    """Start at the newest checkpoint."""


@dataclass(frozen=True)
class Attach:
    """Follow the coordinator that runs."""


@dataclass(frozen=True)
class Return:
    """Return the result on record."""


@dataclass(frozen=True)
class Refuse:
    reason: str
    ways_out: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.ways_out}"


Decision = Start | Resume | Attach | Return | Refuse
Rule = Callable[[ExistingRun, RunRequest], Decision | None]


def decide_submission(existing: ExistingRun, request: RunRequest) -> Decision:
    """The decision of the first rule that applies."""
    return next(decision for rule in RULES if (decision := rule(existing, request)) is not None)


def _refuse_other_name(existing: ExistingRun, request: RunRequest) -> Decision | None:
    """its folder holds a run of another name | is refused"""
    record, run = existing.record, request.run
    if record is None or record.name == run.name:
        return None
    return Refuse(
        f"run_dir={str(run.driver_folder)!r} holds run {record.name!r}, not {run.name!r}",
        "choose another run_dir, or submit it under its own name to go on",
    )


def _refuse_other_settings(existing: ExistingRun, request: RunRequest) -> Decision | None:
    """has other settings or data, on record or running | is refused"""
    run, coordinator, record = request.run, existing.live, existing.record
    where, more = f"its folder {run.driver_folder}", ""
    differences = [] if record is None else recorded_differences(record, request)
    if differences:
        if request.can_extend:
            more = (
                "; for more steps alone, submit it with extend=True (--extend); another name with "
                f"resume={run.storage_uri!r} goes on from its newest checkpoint"
            )
    elif coordinator is not None and coordinator.digest != request.digest:
        where = "it is running now"
        differences = request.identity.differences(coordinator.identity.entries) or [
            "nothing that is recorded: the mesh, planned faults, validation sets or the cost model"
        ]
    if not differences:
        return None
    return Refuse(
        f"run name {run.name!r} is taken by a run with other settings ({where}, in "
        f"{few(differences, NUM_SHOWN, '; ')})",
        f"choose another name and run_dir, or submit the same settings to attach to it{more}",
    )


def _refuse_other_code(existing: ExistingRun, request: RunRequest) -> Decision | None:
    """began with other code of the model, loss or what they call | is refused without `--run.code-changed`"""
    run, changed = request.run, changed_code(existing, request)
    if not changed or run.code_changed:
        return None
    result = "what it has trained is" if existing.is_whole else "its steps so far are"
    return Refuse(
        f"run name {run.name!r} began with other code of {', '.join(changed)}, and {result} the result of that "
        f"({run.storage_uri})",
        "choose another name; or go on with the new code, code_changed=True (--run.code-changed), with more steps if "
        "all are done; or remove that folder to begin anew",
    )


def _return_result(existing: ExistingRun, request: RunRequest) -> Decision | None:
    """has done all its steps | prints the summary; is refused where the weights are gone"""
    if not existing.is_whole:
        return None
    if existing.has_weights:
        return Return()
    return Refuse(
        f"run_dir={request.run.storage_uri!r}: its {SUMMARY_NAME} says that all steps are done, and the weights are "
        "not there",
        f"bring them back, or remove {SUMMARY_NAME} to go on from the newest checkpoint",
    )


def _refuse_running_code(existing: ExistingRun, request: RunRequest) -> Decision | None:
    """trains with other code | is refused"""
    coordinator = existing.running
    if coordinator is None or not (changed := changed_parts(coordinator.sources, request.sources)):
        return None
    return Refuse(
        f"run name {request.run.name!r}: the run is running now with other code of {', '.join(changed)}",
        "choose another name, submit the code with which it began, or stop it first",
    )


def _refuse_other_folder(existing: ExistingRun, request: RunRequest) -> Decision | None:
    """trains in another folder | is refused"""
    coordinator, run = existing.live, request.run
    if coordinator is None or coordinator.folder == run.storage_uri or coordinator.writes_here:
        return None
    return Refuse(
        f"run name {run.name!r} is running now with run_dir={coordinator.folder!r}, not {run.storage_uri!r}",
        "choose another name, or give the same run_dir to attach to it",
    )


def _refuse_other_callbacks(existing: ExistingRun, request: RunRequest) -> Decision | None:
    """trains with callbacks that control it, the submission without, or the reverse | is refused"""
    coordinator = existing.running
    if coordinator is None or coordinator.asks_callbacks == request.asks_callbacks:
        return None
    waits = "waits after each validation for" if coordinator.asks_callbacks else "does not wait for"
    has = "some" if request.asks_callbacks else "none"
    return Refuse(
        f"callbacks: run {request.run.name!r}, which is running now, {waits} callbacks and this submission has {has} "
        "that control it",
        "submit it as it began, or stop it first",
    )


def _attach(existing: ExistingRun, request: RunRequest) -> Decision | None:
    """trains on this Ray cluster | attaches and follows"""
    return None if existing.live is None else Attach()


def _refuse_other_writer(existing: ExistingRun, request: RunRequest) -> Decision | None:
    """is written to from another Ray cluster | is refused"""
    if existing.other_writer is None:
        return None
    return Refuse(
        f"run_dir={request.run.storage_uri!r} is being written to by run {existing.other_writer!r} on another Ray "
        "cluster",
        "choose another run_dir, or stop that run first",
    )


def _resume(existing: ExistingRun, request: RunRequest) -> Decision | None:
    """failed or was stopped, and has checkpoints | resumes from the newest that verifies"""
    return Resume() if existing.has_checkpoint else None


def _start(existing: ExistingRun, request: RunRequest) -> Decision | None:
    """none of these | starts at step 0"""
    return Start()


RULES: tuple[Rule, ...] = (
    _refuse_other_name,
    _refuse_other_settings,
    _refuse_other_code,
    _return_result,
    _refuse_running_code,
    _refuse_other_folder,
    _refuse_other_callbacks,
    _attach,
    _refuse_other_writer,
    _resume,
    _start,
)
"""In their order; the docstring of each is its row in docs/quickstart.md."""


def changed_code(existing: ExistingRun, request: RunRequest) -> list[str]:
    """The parts whose code differs from the record's; a submission that asks for a beginning may have any code."""
    if existing.record is None or not existing.record.sources or request.run.resume == "never":
        return []
    return changed_parts(existing.record.sources, request.sources)


def recorded_differences(record: RunRecord, request: RunRequest) -> list[str]:
    """The settings in which a record differs from the request, as text."""
    here, plans, recorded = request.identity, request.plans, list(record.plans)
    differences = here.differences(record.identity.entries)
    if plans and not len(recorded) <= len(plans) == 1:
        later = plans[len(recorded)][0] if len(plans) > len(recorded) else None
        if list(plans[: len(recorded)]) != recorded or (later is not None and later < record.steps):
            # Steps that the run may have done would have other rates.
            differences.append(f"optim.replanned: {recorded} there, {list(plans)} here")
    if record.identity.entries.get("data") != here.entries.get("data") and (
        files := changed_files(record.files, request.files)
    ):
        differences.insert(0, files)
    return differences


def live_changes(running: RunConfig, requested: RunConfig) -> tuple[list[str], list[str]]:
    """The settings in which a submission differs from the run that it attaches to, as text: those that the run takes
    over while it trains, and those that it does not."""
    there, here = _conduct(running), _conduct(requested)
    if requested.copies == "auto":  # which the start has settled
        del here["copies"]
    texts = {name: f"{name}={here[name]} (it has {there[name]})" for name in here if here[name] != there[name]}
    if any(running.env.get(name) != value for name, value in requested.env.items()):
        texts["env"] = "env"  # values may be secrets
    live = LIVE if running.checkpoint_config.is_on and requested.checkpoint_config.is_on else ()
    return [texts[name] for name in texts if name in live], [texts[name] for name in texts if name not in live]


def _conduct(run: RunConfig) -> dict[str, object]:
    """The settings of a run's conduct, by name."""
    parts = {"checkpoint": vars(run.checkpoint_config), "timeouts": vars(run.timeouts)}
    own = {name: value for name, value in vars(run).items() if name not in OF_SUBMISSION}
    return own | {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}


def other_versions(recorded: Mapping[str, str], here: Mapping[str, str]) -> str:
    """The packages whose recorded version differs from this process's, as text; empty if none does."""
    names = [name for name in recorded if name in here and recorded[name] != here[name]]
    return ", ".join(f"{name} {recorded[name]} there, {here[name]} here" for name in names)
