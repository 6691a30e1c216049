"""The coordinator's side of checkpoints: collects the ranks' parts, commits, removes old ones, finds what to resume.

A thread of its own talks to the storage, in order; the deciding thread never waits for it. What a run does with a
checkpoint is decided in `control`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_ring.config import RunConfig
from elastic_ring.control.messages import Checkpoint
from elastic_ring.errors import CheckpointDamaged, StorageFailed
from elastic_ring.mesh import Mesh
from elastic_ring.state.checkpoint import (
    COMMIT,
    FOLDER,
    Described,
    Manifest,
    commit,
    committed,
    located,
    prune,
    read_manifest,
    set_aside,
)
from elastic_ring.state.storage import Storage, StoredFile, open_or_refuse

log = logging.getLogger(__name__)

PRIOR_FAILURE_S = 86_400.0
"""Time in which one failure is assumed beside those that were seen."""

Post = Callable[[str, Any], None]


@dataclass(frozen=True)
class Resume:
    """Where a submission begins. `checkpoints`: those that may be used, by step; empty for step 0."""

    lineage: int = 0
    checkpoints: tuple[Checkpoint, ...] = ()
    resumed_from: tuple[Mapping[str, Any], ...] = ()
    """The resumes so far, this one last: {"step", "path"}."""

    @property
    def step(self) -> int:
        """The step that runs first, if the newest verifies."""
        return self.checkpoints[-1].step if self.checkpoints else 0


@dataclass
class _Pending:
    """The parts of one checkpoint that have been written."""

    parts: dict[tuple[int, int], Mapping[str, Any]] = field(default_factory=dict)
    failed: str = ""

    def is_complete(self) -> bool:
        one = next(iter(self.parts.values()))
        return not self.failed and len(self.parts) == one["cp"] * one["dp"] and self.head is not None

    @property
    def head(self) -> Mapping[str, Any] | None:
        return next((part for part in self.parts.values() if "tensors" in part), None)


class CheckpointKeeper:
    """Commits checkpoints of one run. `post(kind, body)` puts results into the deciding thread's queue:

    `checkpoint`: one that counts now, as summary.json has it; `checkpoints`: all that count, by step;
    `checkpoint-failed`: why one was not written.
    """

    def __init__(
        self, run: RunConfig, resume: Resume, term: int, facts: Mapping[str, Any], post: Post,
        resumed_from: Callable[[], Sequence[Mapping[str, Any]]] = tuple, recorded: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`facts` go into each manifest: `identity`, and under `run` what a reader may want to know. `resumed_from`
        tells of the checkpoints that this run began at so far. `recorded` returns once the records are in storage."""
        self._resumed_from, self._recorded = resumed_from, recorded
        self._run, self._resume, self._term, self._facts, self._post = run, resume, term, facts, post
        self._storage = Storage(run.storage_uri, timeout_s=run.timeouts.storage_s)
        self._pending: dict[tuple[int, int, int], _Pending] = {}
        self._oldest = (0, 0)
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
        self._failing_since: float | None = None

    def open(self) -> None:
        """Start the thread, and have it tell which checkpoints count."""
        self._thread.start()
        self._jobs.put(self._tell)

    def close(self, timeout_s: float) -> bool:
        """End what is under way, remove what will never count, and stop. Whether all of it is done in time."""
        if not self._thread.is_alive():
            return True
        self._jobs.put(lambda: self._sweep(None))
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def has_parts(self) -> bool:
        return bool(self._pending)

    @property
    def failing_s(self) -> float:
        """For how long no checkpoint could be written although one was tried."""
        return 0.0 if self._failing_since is None else time.monotonic() - self._failing_since

    # ------------------------------------------------------------ the deciding thread

    def written(self, part: Mapping[str, Any]) -> None:
        """A rank's part, or its error. Parts of members that gave their steps up do not count."""
        identity = part["term"], part["generation"]
        if identity < self._oldest or part["lineage"] != self._resume.lineage:
            log.info("a part of step %d of generation %d comes too late", part["step"], part["generation"])
            return
        pending = self._pending.setdefault((part["step"], *identity), _Pending())
        if "error" in part and not pending.failed:
            pending.failed = f"cp_rank {part['cp_rank']}: {part['error']}"
            self._failed(part["step"], pending.failed)
        pending.parts[part["cp_rank"], part["part"]] = part

    def look(self, last_step: int) -> None:
        """Commit what is complete and whose steps are all recorded: `last_step` is the last that is."""
        for key in sorted(self._pending):
            step, pending = key[0], self._pending[key]
            if not pending.is_complete() or last_step < step - 1:
                continue
            for other in [known for known in self._pending if known <= key]:
                del self._pending[other]
            self._jobs.put(lambda step=step, pending=pending: self._commit(step, pending))  # type: ignore[misc]
            return

    def gone_back(self, step: int, identity: tuple[int, int]) -> None:
        """The build `identity`, (term, generation), begins at the checkpoint of `step`: later ones do not count."""
        self._oldest = max(self._oldest, identity)
        self._pending = {key: value for key, value in self._pending.items() if key[1:] >= identity}
        self._jobs.put(lambda: self._set_aside_later(step))

    def damaged(self, folder: str, why: str) -> None:
        """A checkpoint that did not verify: kept, but it does not count any more."""
        self._jobs.put(lambda: self._set_aside(folder, why))

    # ------------------------------------------------------------ the keeper's thread

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._storage.open(write=False)
                job()
            except (StorageFailed, CheckpointDamaged) as error:
                log.warning("%s", error)
                self._failed(-1, str(error))
            except Exception:
                log.exception("the checkpoints' thread goes on after an error")

    def _commit(self, step: int, pending: _Pending) -> None:
        head = pending.head
        assert head is not None
        parts = [pending.parts[key] for key in sorted(pending.parts)]
        manifest = Manifest(
            step=step, lineage=self._resume.lineage, term=self._term, identity=self._facts["identity"],
            folder=head["folder"], cp=head["cp"], num_parts=head["dp"],
            files=tuple(StoredFile(**part["file"]) for part in parts),
            tensors={name: Described(**{**one, "shape": tuple(one["shape"])}) for name, one in head["tensors"].items()},
            meta=head["meta"], run={**self._facts["run"], "resumed_from": list(self._resumed_from())},
        )  # fmt: skip
        begun = time.monotonic()
        self._recorded()  # what comes before a checkpoint must outlive the cluster too
        if not commit(self._storage, manifest):
            log.warning("step %d has a checkpoint already: another writer was first", step)
            self._storage.remove_folder(manifest.folder)
            return
        prune(self._storage, self._run.checkpoint_config.keep_last, self._run.checkpoint_config.keep_every,
              self._resume.lineage)  # fmt: skip
        self._sweep(step)
        self._failing_since = None
        self._post("checkpoint", {
            "step": step, "path": _uri(self._storage, manifest.folder.rpartition("/")[0]), "bytes": manifest.num_bytes,
            "blocked_s": max(part["blocked_s"] for part in parts),
            "total_s": max(part["total_s"] for part in parts) + time.monotonic() - begun,
        })  # fmt: skip
        self._tell()

    def _tell(self) -> None:
        own = [checkpoint for checkpoint in known(self._storage) if lineage_of(checkpoint) == self._resume.lineage]
        first = [one for one in self._resume.checkpoints if lineage_of(one) != self._resume.lineage]
        self._post("checkpoints", (*first, *own))

    def _set_aside(self, folder: str, why: str) -> None:
        uri, inside = located(self._run.storage_uri, folder)
        if uri == self._run.storage_uri and self._storage.exists(f"{inside}/{COMMIT}"):
            set_aside(self._storage, inside, [why])
        log.error("%s does not verify and is kept aside: %s", folder, why)
        self._tell()

    def _set_aside_later(self, step: int) -> None:
        for checkpoint in known(self._storage):
            if checkpoint.step > step and lineage_of(checkpoint) == self._resume.lineage:
                set_aside(self._storage, checkpoint.folder, [f"the run went back to step {step}"])
                log.warning("%s is of steps that were given up: kept aside", checkpoint.folder)
        self._tell()

    def _sweep(self, below: int | None) -> None:
        """Remove what was begun and never committed, of steps below `below` or of all, and abort left uploads."""
        lineage = f"lineage-{self._resume.lineage:03d}"
        for name in self._storage.folders(FOLDER):
            step = int(name.removeprefix("step-"))
            if below is not None and step >= below:
                continue
            folder = f"{FOLDER}/{name}/{lineage}"
            files = [file for file, _ in self._storage.names(folder)]
            if files and not any(file.endswith(".json") for file in files):
                self._storage.remove_folder(folder)
                if not self._storage.folders(f"{FOLDER}/{name}"):
                    self._storage.remove_folder(f"{FOLDER}/{name}")

    def _failed(self, step: int, why: str) -> None:
        self._failing_since = self._failing_since or time.monotonic()
        self._post("checkpoint-failed", {"step": step, "why": why})


# ---------------------------------------------------------------- finding where to begin


def known(storage: Storage) -> list[Checkpoint]:
    """The checkpoints that count, of all lineages, by lineage and step. Unreadable manifests are left out, and told."""
    found = []
    for folder in reversed(committed(storage)):
        try:
            manifest = read_manifest(storage, folder)
        except CheckpointDamaged as error:
            log.error("%s", error)
            continue
        found.append(Checkpoint(manifest.step, folder, Mesh(manifest.num_parts, manifest.cp)))
    return found


def lineage_of(checkpoint: Checkpoint) -> int:
    return int(checkpoint.folder.rpartition("lineage-")[2])


def find_resume(run: RunConfig, identity: str, settings: Mapping[str, Any]) -> Resume:
    """Where a submission of these settings begins, as `run.resume` asks.

    Raises: ValueError for a step without a checkpoint, a path that is none, and a checkpoint of another run's settings
    (it names what differs) or of a newer format; StorageFailed.
    """
    writes = run.checkpoint_config.is_on and not Storage(run.storage_uri).is_local  # a folder is tried elsewhere
    storage = open_or_refuse(run.storage_uri, write=writes, timeout_s=run.timeouts.storage_s)
    found = known(storage)
    newest = max([lineage_of(checkpoint) for checkpoint in found], default=0)
    if run.resume == "never":
        return Resume(newest + bool(found))
    if run.resume == "auto":
        usable = [checkpoint for checkpoint in found if lineage_of(checkpoint) == newest]
        return _resume(run, storage, usable, newest, identity, settings)
    if run.resume.isdigit():
        usable = [checkpoint for checkpoint in found if checkpoint.step == int(run.resume)][-1:]
        if not usable:
            steps = ", ".join(str(checkpoint.step) for checkpoint in found)
            raise ValueError(f"resume={run.resume!r}: no checkpoint of that step in {storage.uri}; "
                             f"there are {steps or 'none'}")  # fmt: skip
        return _resume(run, storage, usable, newest + 1, identity, settings)
    return _resume_from(run, newest + bool(found), identity, settings)


def _resume_from(run: RunConfig, lineage: int, identity: str, settings: Mapping[str, Any]) -> Resume:
    """From a path: of one checkpoint, or of a run, whose newest is taken."""
    uri, folder = located("", run.resume.rstrip("/"))
    where = uri or run.resume.rstrip("/")
    storage = open_or_refuse(where, write=False, timeout_s=run.timeouts.storage_s, setting="resume")
    usable = [one for one in known(storage) if one.folder == folder or not uri][-1:]
    if not usable:
        raise ValueError(f"resume={run.resume!r}: there is no checkpoint; give auto, never, a step, or the path of a "
                         "run or of one of its checkpoints (elastic-ring checkpoints list PATH)")  # fmt: skip
    whole = [Checkpoint(one.step, _uri(storage, one.folder), one.mesh) for one in usable]
    return _resume(run, storage, whole, lineage, identity, settings)


def _resume(
    run: RunConfig, storage: Storage, usable: Sequence[Checkpoint], lineage: int, identity: str,
    settings: Mapping[str, Any],
) -> Resume:  # fmt: skip
    if not usable:
        return Resume(lineage)
    newest = usable[-1]
    _, folder = located(storage.uri, newest.folder)
    manifest = read_manifest(storage, folder)
    if manifest.identity != identity:
        differing = _differences(manifest.run.get("settings", {}), settings)
        raise ValueError(
            f"{_uri(storage, folder)} is a checkpoint of other settings ({differing}): submit the same, choose another "
            "run name, or give resume='never' in a new storage_path"
        )
    before = tuple(manifest.run.get("resumed_from", ()))
    return Resume(lineage, tuple(usable), (*before, {"step": newest.step, "path": _uri(storage, folder)}))


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    told = [f"{name}: {there.get(name)} there, {here.get(name)} here" for name in sorted({*there, *here})
            if there.get(name) != here.get(name)]  # fmt: skip
    return "; ".join(told[:3]) or "nothing that is recorded"


def _uri(storage: Storage, name: str) -> str:
    return f"{storage.uri.rstrip('/')}/{name}"
