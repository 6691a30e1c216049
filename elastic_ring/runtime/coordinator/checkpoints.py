"""The coordinator's side of checkpoints: collects the ranks' parts, commits, removes old ones, finds what to resume.

A thread of its own talks to the storage, in order; the deciding thread never waits for it. What a run does with a
checkpoint is decided in `control`.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from elastic_ring.config import RunConfig
from elastic_ring.control.messages import Checkpoint, CorpusVersion
from elastic_ring.errors import CheckpointDamaged, StorageFailed
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.coordinator.lineage import Earlier, earlier
from elastic_ring.state.checkpoints.checkpoint import (
    COMMIT,
    FOLDER,
    REJECTED,
    Described,
    Manifest,
    commit,
    committed,
    located,
    prune,
    read_manifest,
    set_aside,
    wrong_with,
)
from elastic_ring.state.storage.folder import Storage, StoredFile, open_or_refuse

log = logging.getLogger(__name__)

LINEAGES = "lineages"
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
    corpus: tuple[CorpusVersion, ...] = ()
    """The later manifests of the corpus: those by then, and those that earlier submissions took after it."""
    num_steps: int = 0
    """How many steps earlier submissions ran, where the corpus may grow: these use the same sequences again."""

    @property
    def step(self) -> int:
        """The step that runs first, if the newest verifies."""
        return self.checkpoints[-1].step if self.checkpoints else 0

    def journalled(self) -> dict[str, Any]:
        """What the next submission needs to know of this one's beginning, for the journal's first note."""
        corpus = [asdict(version) for version in self.corpus]
        return {"lineage": self.lineage, "corpus": corpus, "num_steps": self.num_steps}


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
        corpus: Callable[[], Sequence[Mapping[str, Any]]] = tuple,
    ) -> None:  # fmt: skip
        """`facts` go into each manifest: `identity`, and under `run` what a reader may want to know. `resumed_from`
        tells of the checkpoints that this run began at so far. `recorded` returns once the records are in storage.
        `corpus` tells of the later manifests of a corpus that grows, and from which step each holds."""
        self._resumed_from, self._recorded, self._corpus = resumed_from, recorded, corpus
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
        self._jobs.put(self._begin_lineage)
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

    def clean(self, step: int) -> None:
        """A checkpoint of `step` counts and the core knows it: remove what retention does not keep, and leftovers."""
        written = {key[0] for key in self._pending}
        self._jobs.put(lambda: self._clean(step, written))

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
        if (head["term"], head["generation"]) < self._oldest:
            log.info("the checkpoint of step %d is of members that gave their steps up", step)
            return
        parts = [pending.parts[key] for key in sorted(pending.parts)]
        manifest = Manifest(
            step=step, lineage=self._resume.lineage, term=self._term, identity=self._facts["identity"],
            folder=head["folder"], cp=head["cp"], num_parts=head["dp"],
            files=tuple(StoredFile(**part["file"]) for part in parts),
            tensors={name: Described(**{**one, "shape": tuple(one["shape"])}) for name, one in head["tensors"].items()},
            meta=head["meta"], run={**self._facts["run"], "resumed_from": list(self._resumed_from()),
                 **({"corpus": corpus} if (corpus := list(self._corpus())) else {})},
        )  # fmt: skip
        begun = time.monotonic()
        self._recorded()  # what comes before a checkpoint must outlive the cluster too
        if not commit(self._storage, manifest):
            log.warning("step %d has a checkpoint already: another writer was first", step)
            self._storage.remove_folder(manifest.folder)
            return
        self._failing_since = None
        self._post("checkpoint", {
            "step": step, "path": _uri(self._storage, manifest.folder.rpartition("/")[0]), "bytes": manifest.num_bytes,
            "blocked_s": max(part["blocked_s"] for part in parts),
            "total_s": max(part["total_s"] for part in parts) + time.monotonic() - begun,
        })  # fmt: skip
        self._tell()

    def _clean(self, step: int, written: Collection[int]) -> None:
        """What is left over stays where the store does not let it be removed: the checkpoint counts all the same."""
        config = self._run.checkpoint_config
        try:
            prune(self._storage, config.keep_last, config.keep_every, self._resume.lineage)
            self._sweep(step, written)
        except StorageFailed as error:
            log.warning("old checkpoints could not be removed: %s", error)
        self._tell()

    def _begin_lineage(self) -> None:
        """So that a later submission goes on in this lineage, also where it has no checkpoint yet."""
        begun = {"resume": self._run.resume, "from": [one.folder for one in self._resume.checkpoints[-1:]]}
        self._storage.create(lineage_name(self._resume.lineage), json.dumps(begun).encode())

    def _tell(self) -> None:
        own = [checkpoint for checkpoint in known(self._storage) if lineage_of(checkpoint) == self._resume.lineage]
        first = [one for one in self._resume.checkpoints if lineage_of(one) != self._resume.lineage]
        self._post("checkpoints", (*first, *own))

    def _set_aside(self, folder: str, why: str) -> None:
        uri, inside = located(self._run.storage_uri, folder)
        if uri == self._run.storage_uri and self._storage.exists(f"{inside}/{COMMIT}"):
            if seen := wrong_with(self._storage, inside):
                set_aside(self._storage, inside, seen)
                log.error("%s does not verify and is kept aside: %s", folder, "; ".join(seen))
            else:  # that worker's node may lack the mount, or have bad memory
                log.error("%s is whole as seen from here, but a worker could not use it: %s", folder, why)
        self._tell()

    def _set_aside_later(self, step: int) -> None:
        for checkpoint in known(self._storage):
            if checkpoint.step > step and lineage_of(checkpoint) == self._resume.lineage:
                set_aside(self._storage, checkpoint.folder, [f"the run went back to step {step}"])
                log.warning("%s is of steps that were given up: kept aside", checkpoint.folder)
        self._tell()

    def _sweep(self, below: int | None, written: Collection[int] = ()) -> None:
        """Remove what was begun and never committed, of steps below `below` or of all, but not of those in `written`,
        whose parts are on their way; and abort the uploads that were left there."""
        lineage = f"lineage-{self._resume.lineage:03d}"
        for name in self._storage.folders(FOLDER):
            number = name.removeprefix("step-")
            if not number.isdigit() or int(number) in written or (below is not None and int(number) >= below):
                continue
            self._storage.abort_uploads(f"{FOLDER}/{name}/{lineage}/")
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
        except StorageFailed:
            if storage.exists(f"{folder}/{COMMIT}"):
                raise
            continue  # removed since it was listed
        found.append(Checkpoint(manifest.step, folder, Mesh(manifest.num_parts, manifest.cp)))
    return found


def lineage_of(checkpoint: Checkpoint) -> int:
    return int(checkpoint.folder.rpartition("lineage-")[2])


def find_resume(run: RunConfig, identity: str, settings: Mapping[str, Any], *, grows: bool = False) -> Resume:
    """Where a submission of these settings begins, as `run.resume` asks. `grows`: the corpus may grow while it trains.

    Raises: ValueError for a step without a checkpoint, a path that is none, and a checkpoint of another run's settings
    (it names what differs) or of a newer format; StorageFailed; JournalDamaged.
    """
    writes = run.checkpoint_config.is_on and not Storage(run.storage_uri).is_local  # a folder is tried elsewhere
    storage = open_or_refuse(run.storage_uri, write=writes, timeout_s=run.timeouts.storage_s)
    found = known(storage)
    begun = {int(name[-8:-5]): json.loads(storage.read(name)) for name, _ in storage.names(LINEAGES)}
    newest = max([*begun, *map(lineage_of, found)], default=-1)
    if run.resume == "never":
        return Resume(newest + 1)
    if run.resume == "auto":
        usable = [checkpoint for checkpoint in found if lineage_of(checkpoint) == newest]
        if not usable and newest in begun:
            usable = [checkpoint for checkpoint in found if checkpoint.folder in begun[newest]["from"]]
        if not usable:
            _refuse_where_all_were_rejected(storage, newest)
        before = earlier(storage, max(newest, 0)) if grows else Earlier()
        return _resume(storage, usable, max(newest, 0), identity, settings, before)
    if run.resume.isdigit():
        usable = [checkpoint for checkpoint in found if checkpoint.step == int(run.resume)][-1:]
        if not usable:
            steps = ", ".join(str(checkpoint.step) for checkpoint in found)
            raise ValueError(f"resume={run.resume!r}: no checkpoint of that step in {storage.uri}; "
                             f"there are {steps or 'none'}")  # fmt: skip
        before = earlier(storage, lineage_of(usable[-1])) if grows else Earlier()
        return _resume(storage, usable, newest + 1, identity, settings, before)
    return _resume_from(run, newest + 1, identity, settings, grows)


def _refuse_where_all_were_rejected(storage: Storage, lineage: int) -> None:
    """Nobody wants to find out after a week that a run has begun at step 0 again."""
    ending = f"lineage-{lineage:03d}/"
    aside = [name for name, _ in storage.names(FOLDER) if name.endswith(REJECTED) and ending in name]
    if aside:
        raise ValueError(
            f"resume='auto': every checkpoint in {storage.uri} was set aside ({len(aside)}; elastic-ring checkpoints "
            "list tells why): give resume='never' to begin at step 0, or the path of another run's checkpoint"
        )


def lineage_name(lineage: int) -> str:
    return f"{LINEAGES}/{lineage:03d}.json"


def _resume_from(run: RunConfig, lineage: int, identity: str, settings: Mapping[str, Any], grows: bool) -> Resume:
    """From a path: of one checkpoint, or of a run, whose newest is taken."""
    uri, folder = located("", run.resume.rstrip("/"))
    where = uri or run.resume.rstrip("/")
    storage = open_or_refuse(where, write=False, timeout_s=run.timeouts.storage_s, setting="resume")
    usable = [one for one in known(storage) if one.folder == folder or not uri][-1:]
    if not usable:
        raise ValueError(f"resume={run.resume!r}: there is no checkpoint; give auto, never, a step, or the path of a "
                         "run or of one of its checkpoints (elastic-ring checkpoints list PATH)")  # fmt: skip
    whole = [Checkpoint(one.step, _uri(storage, one.folder), one.mesh) for one in usable]
    before = earlier(storage, lineage_of(usable[-1])) if grows else Earlier()
    return _resume(storage, whole, lineage, identity, settings, before)


def _resume(
    storage: Storage, usable: Sequence[Checkpoint], lineage: int, identity: str, settings: Mapping[str, Any],
    before: Earlier,
) -> Resume:  # fmt: skip
    if not usable:
        return Resume(lineage, corpus=before.corpus, num_steps=before.num_steps)
    newest = usable[-1]
    _, folder = located(storage.uri, newest.folder)
    manifest = read_manifest(storage, folder)
    if manifest.identity != identity:
        differing = _differences(manifest.run.get("settings", {}), settings)
        raise ValueError(
            f"{_uri(storage, folder)} is a checkpoint of other settings ({differing}): submit the same, choose another "
            "run name, or give resume='never' in a new storage_path"
        )
    resumed_from = (*manifest.run.get("resumed_from", ()), {"step": newest.step, "path": _uri(storage, folder)})
    by_then = tuple(CorpusVersion(**version) for version in manifest.run.get("corpus", ()))
    corpus = max(by_then, before.corpus, key=len)  # of one lineage, so the longer begins with the shorter
    return Resume(lineage, tuple(usable), resumed_from, corpus, before.num_steps)


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    told = [f"{name}: {there.get(name)} there, {here.get(name)} here" for name in sorted({*there, *here})
            if there.get(name) != here.get(name)]  # fmt: skip
    return "; ".join(told[:3]) or "nothing that is recorded"


def _uri(storage: Storage, name: str) -> str:
    return f"{storage.uri.rstrip('/')}/{name}"
