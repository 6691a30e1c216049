"""The coordinator's side of checkpoints: collects the ranks' parts, commits, removes old ones.

A thread of its own talks to the storage, in order; the deciding thread never waits for it. What a run does with a
checkpoint is decided in `control`.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from elastic_ring.config import RunConfig
from elastic_ring.control.decisions.terms import is_late
from elastic_ring.control.messages import Checkpoint
from elastic_ring.errors import CheckpointDamaged, StaleMessage, StorageFailed, TermLost
from elastic_ring.monitor.json_files import DAMAGED, json_bytes
from elastic_ring.runtime.agent.messages import Said
from elastic_ring.runtime.coordinator.inbox import CheckpointCounts, CheckpointFailed, CheckpointsListed, Put
from elastic_ring.runtime.coordinator.resume import (
    LINEAGES,
    Resume,
    known,
    lineage_name,
    lineage_of,
    lineage_of_folder,
    listed,
    shortened,
    uri_of,
)
from elastic_ring.state.checkpoints.checkpoint import commit, committed, set_aside, wrong_with
from elastic_ring.state.checkpoints.manifest import COMMIT, FOLDER, Described, Manifest, age_key, located, read_manifest
from elastic_ring.state.checkpoints.retention import UNFINISHED_AFTER_S, keep, prune
from elastic_ring.state.checkpoints.weight_files import WEIGHTS_FOLDER
from elastic_ring.state.header import ShardMeta
from elastic_ring.state.storage.backend import Retries, StoredFile, Upload
from elastic_ring.state.storage.folder import Storage

log = logging.getLogger(__name__)

PRIOR_FAILURE_S = 86_400.0
"""Time in which one failure is assumed beside those that were seen."""
RETRY_S = 96.0
"""So long a job that the storage refused is tried again; each request is tried again for `storage_s` besides."""
ASK_AGAIN_S = 60.0
"""From a checkpoint that was not written to the next try, where the next one is due later."""
READ_BACK_BYTES = 2 << 30
"""The coordinator reads a checkpoint of at most so many bytes back before it removes an older one."""


@contextmanager
def _left_over() -> Iterator[None]:
    """What is old stays where the store does not let it be removed: the newest checkpoint counts all the same."""
    try:
        yield
    except (StorageFailed, CheckpointDamaged) as error:
        log.warning("old checkpoints could not be removed: %s", error)


@dataclass
class _Retention:
    """Of this lineage. `read_back`: the newest step of which every byte was read; `kept`: the step whose checkpoint is
    to stay; `pruned`: the newest checkpoint when older ones were last removed."""

    read_back: int | None
    kept: int | None = None
    pruned: str | None = None


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


@dataclass
class Tries:
    """How tries to write checkpoints went. Times are those of the monotonic clock."""

    failing_since: float | None = None
    commit_since: float | None = None  # the oldest that is queued or under way
    tried_at: float = 0.0

    def failed(self) -> None:
        self.tried_at = time.monotonic()
        self.failing_since = self.failing_since or self.tried_at

    def failing_s(self, storage_s: float) -> float:
        """For how long none could be written although one was tried. A listing that fails is no such try."""
        since, queued = self.failing_since, self.commit_since
        if since is None and queued is not None and time.monotonic() - queued > storage_s:
            since = queued  # a store that hangs fails nothing
        return 0.0 if since is None else time.monotonic() - since

    def take_retry(self) -> bool:
        """Whether to take a checkpoint now because the last one was not written: once in ASK_AGAIN_S."""
        if self.failing_since is None or time.monotonic() - self.tried_at < ASK_AGAIN_S:
            return False
        self.tried_at = time.monotonic()
        return True


@dataclass(frozen=True)
class Writer:
    """Who writes the manifests, and what each has beside its files.

    `facts` go into each: `identity`, and under `run` what a reader may want to know. `attempt` is this submission's.
    `resumed_from` returns the checkpoints at which this run has begun. `data` returns the later manifests of a growing
    corpus and the batches left out, each with its first step. Before each, `recorded` returns once the records are in
    storage, and `inject` fires the faults planned before the manifest of a step.
    """

    term: int
    facts: Mapping[str, Any]
    attempt: str = ""
    resumed_from: Callable[[], Sequence[Mapping[str, Any]]] = tuple
    data: Callable[[], Mapping[str, Any]] = dict
    recorded: Callable[[], None] = lambda: None
    inject: Callable[[int], None] = lambda step: None

    def run(self) -> dict[str, Any]:
        """What a reader may want to know of the run."""
        later = {name: value for name, value in self.data().items() if value}
        return {**self.facts["run"], "resumed_from": list(self.resumed_from()), **later}


class CheckpointKeeper:
    """Commits checkpoints of one run. `post` puts results into the deciding thread's queue: a valid new one, as in
    summary.json; all valid ones, by step; why one was not written; lines for the log and the driver."""

    def __init__(
        self,
        run: RunConfig,
        resume: Resume,
        writer: Writer,
        post: Put,
        ask: Callable[[], None] = lambda: None,
    ) -> None:
        """`ask` looks for a newer term in the storage before each write or removal, and raises StaleMessage or TermLost
        if there is one."""
        self._run, self._resume, self._writer, self._post, self._ask = run, resume, writer, post, ask
        self._storage = Storage(run.storage_uri, resume.excludes, run.timeouts.storage_s)
        self._pending: dict[tuple[int, int, int], _Pending] = {}
        self._oldest = (0, 0)
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
        self._closing = threading.Event()
        self._tries = Tries()
        self._seen = {one.folder for one in resume.checkpoints}  # and this submission's own
        own = [one for one in resume.checkpoints if self._is_own(one)]
        self._retention = _Retention(own[-1].step if own else None)

    def open(self) -> None:
        """Start the thread, and have it tell which checkpoints count."""
        self._thread.start()
        self._jobs.put(self._set_damaged_aside)
        self._jobs.put(self._begin_lineage)
        self._jobs.put(self._abort_old_uploads)
        self._jobs.put(self._tell)

    def close(self, timeout_s: float, *, prunes: bool = False) -> bool:
        """End the work under way, remove files that will never count, and stop. Whether all of it is done in time.
        `prunes`: retention holds at once for a checkpoint that counts only now, of which nobody will tell `clean`."""
        if not self._thread.is_alive():
            return True
        self._closing.set()
        if prunes:
            self._jobs.put(self._prune_own)
        self._jobs.put(lambda: self._sweep(None))
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """The run is another submission's: what is queued is not done, and nothing is removed."""
        self._closing.set()
        self._jobs.put(None)

    @property
    def has_parts(self) -> bool:
        return bool(self._pending)

    @property
    def failing_s(self) -> float:
        """As `Tries.failing_s`."""
        return self._tries.failing_s(self._run.timeouts.storage_s)

    def take_retry(self) -> bool:
        """As `Tries.take_retry`."""
        return self._tries.take_retry()

    # ------------------------------------------------------------ the deciding thread

    def written(self, part: Mapping[str, Any]) -> None:
        """A rank's part, or its error. Parts of members that have gone back do not count."""
        identity = part["term"], part["generation"]
        if "missed" in part:
            if identity >= self._oldest:
                self._failed(part["step"], part["missed"])
            return
        if identity < self._oldest or part["lineage"] != self._resume.lineage:
            log.info(
                "ignored a late part of the checkpoint of step %d, generation %d", part["step"], part["generation"]
            )
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
            for other in [each for each in self._pending if each <= key]:
                del self._pending[other]
            self._tries.commit_since = self._tries.commit_since or time.monotonic()
            self._jobs.put(lambda step=step, pending=pending: self._try_commit(step, pending))  # type: ignore[misc]
            return

    def clean(self, step: int) -> None:
        """A checkpoint of `step` counts and the core knows it: remove what retention does not keep, and leftovers."""
        written = {key[0] for key in self._pending}
        self._jobs.put(lambda: self._clean(step, written))

    def keep(self, step: int) -> None:
        """Once the checkpoint of `step` counts, retention leaves it, and none that was kept before."""
        self._jobs.put(lambda: self._keep(step))

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
                Retries(RETRY_S, pause=self._closing.wait)(
                    partial(self._try, job), lambda error: not isinstance(error, (StorageFailed, CheckpointDamaged))
                )
            except (StaleMessage, TermLost) as error:
                log.warning("the checkpoints' thread ends: %s", error)
                return  # the deciding thread looks by itself, and gets the error
            except (StorageFailed, CheckpointDamaged) as error:
                log.warning("%s; given up", error)
            except Exception:
                log.exception("the checkpoints' thread goes on after an error")

    def _try(self, job: Callable[[], None]) -> None:
        self._storage.open(write=False)
        self._ask()
        job()

    def _try_commit(self, step: int, pending: _Pending) -> None:
        try:
            self._commit(step, pending)
        except (StaleMessage, TermLost):
            raise
        except Exception as error:
            if not pending.failed:
                pending.failed = str(error)
                self._failed(step, pending.failed)
            raise
        self._tries.commit_since = None

    def _keep(self, step: int) -> None:
        """`step`: of a checkpoint that may not count yet."""
        self._retention.kept = step
        if self._counts(step):
            keep(self._storage, step)

    def _counts(self, step: int) -> bool:
        return any(age_key(folder) == (self._resume.lineage, step) for folder in committed(self._storage))

    def _commit(self, step: int, pending: _Pending) -> None:
        head = pending.head
        assert head is not None
        if (head["term"], head["generation"]) < self._oldest:
            self._failed(step, "its members have gone back to an earlier step")
            return
        parts = [pending.parts[key] for key in sorted(pending.parts)]
        manifest = Manifest(
            step=step,
            lineage=self._resume.lineage,
            term=self._writer.term,
            identity=self._writer.facts["identity"],
            folder=head["folder"],
            cp=head["cp"],
            num_parts=head["dp"],
            files=tuple(StoredFile(**part["file"]) for part in parts),
            tensors={name: Described(**{**one, "shape": tuple(one["shape"])}) for name, one in head["tensors"].items()},
            meta=ShardMeta.from_plain(head["meta"]),
            run=self._writer.run(),
        )
        begun = time.monotonic()
        self._writer.recorded()  # what comes before a checkpoint must outlive the cluster too
        self._check_files(manifest)
        self._writer.inject(step)
        self._ask()
        if not commit(self._storage, manifest) and (there := self._committed_folder(manifest)) != manifest.folder:
            self._storage.remove_folder(manifest.folder)
            # Members that begin at a step may save it once more, since a callback wants it.
            if not (self._writer.attempt and f"/attempt-{self._writer.attempt[:8]}-" in there):
                self._failed(step, "there is one already, of another writer")
            return
        self._tries.failing_since = None
        if step == self._retention.kept:
            keep(self._storage, step)
        if head.get("interval"):
            self._post(Said(head["interval"]))
        counted = {
            "step": step,
            "path": uri_of(self._storage, manifest.folder.rpartition("/")[0]),
            "bytes": manifest.num_bytes,
            "blocked_s": max(part["blocked_s"] for part in parts),
            "total_s": max(part["total_s"] for part in parts) + time.monotonic() - begun,
        }
        self._post(CheckpointCounts(counted))
        self._jobs.put(self._tell)  # a job of its own: trying it again must not commit again

    def _committed_folder(self, manifest: Manifest) -> str:
        """The digest of the manifest in storage: this one, if an earlier try wrote it and then failed."""
        return read_manifest(self._storage, manifest.folder.rpartition("/")[0]).folder

    def _check_files(self, manifest: Manifest) -> None:
        """Raises StorageFailed unless all files are there as this node sees them, each with its size."""
        sizes = dict(self._storage.names(manifest.folder))
        for file in manifest.files:
            if sizes.get(file.name) != file.num_bytes:
                seen = "missing" if file.name not in sizes else f"of {sizes[file.name]} bytes"
                raise StorageFailed(
                    f"{uri_of(self._storage, file.name)} is {seen} on the coordinator's node, a worker wrote "
                    f"{file.num_bytes} bytes: storage_path must be one place for all nodes",
                    path=file.name,
                )

    def _prune_own(self) -> None:
        """If a checkpoint of this submission counts that `clean` has not seen: one that wrote none removes none."""
        before = {one.folder for one in self._resume.checkpoints}
        if (newest := self._newest()) is not None and newest not in {*before, self._retention.pruned}:
            self._prune()
            self._tell()

    def _clean(self, step: int, written: Collection[int]) -> None:
        self._prune()
        with _left_over():
            self._sweep(step, written)
        self._tell()

    def _prune(self) -> None:
        """Remove the checkpoints that retention does not keep, once the newest is read back."""
        config, held = self._run.checkpoint_config, self._retention
        with _left_over():
            self._look_at_newest()
            prune(self._storage, config.keep_last, config.keep_every, self._resume.lineage, read_back=held.read_back)
            held.pruned = self._newest()

    def _look_at_newest(self) -> None:
        """Read the newest checkpoint back before an older one goes in its favour, unless it is large: then the newest
        that was read whole stays, too."""
        if (folder := self._newest()) is not None:
            manifest = read_manifest(self._storage, folder)
            if manifest.num_bytes <= READ_BACK_BYTES and not self._set_aside_if_damaged(folder):
                self._retention.read_back = manifest.step

    def _newest(self) -> str | None:
        """The folder of this lineage's newest checkpoint."""
        own = (folder for folder in committed(self._storage) if lineage_of_folder(folder) == self._resume.lineage)
        return next(own, None)

    def _begin_lineage(self) -> None:
        """So that a later submission goes on in this lineage, also where it has no checkpoint yet."""
        others = [located(self._storage.uri, one.folder) for one in self._resume.checkpoints if not self._is_own(one)]
        # A checkpoint of this storage by its name in it, which stays where the storage moves.
        paths = [folder if uri == self._storage.uri else f"{uri}/{folder}" for uri, folder in others[-1:]]
        begun = {"resume": self._run.resume, "from": paths, "identity": self._writer.facts["identity"]}
        self._storage.create(lineage_name(self._resume.lineage), json_bytes(begun))

    def _set_damaged_aside(self) -> None:
        """Takes over the driver's findings: checkpoints that are seen from here too, and records of lineages."""
        for name, why in self._resume.damaged.items():
            if name.startswith(f"{LINEAGES}/") and self._storage.exists(name):
                self._storage.create(f"{name}{DAMAGED}{secrets.token_hex(4)}", self._storage.read_record(name))
                self._storage.remove(name)
            elif lineage_of_folder(name) >= 0 and self._storage.exists(f"{name}/{COMMIT}"):
                seen = wrong_with(self._storage, name)
                if seen or read_manifest(self._storage, name).identity != self._writer.facts["identity"]:
                    set_aside(self._storage, name, seen or [why])

    def _tell(self) -> None:
        found, damaged = listed(self._storage)
        for folder in damaged:
            if lineage_of_folder(folder) >= 0:  # other names are none of the run's
                self._set_aside_if_damaged(folder)
        own = [one for one in found if lineage_of(one) == self._resume.lineage and not self._is_late(one)]
        first = [one for one in self._resume.checkpoints if not self._is_own(one)]
        self._post(CheckpointsListed((*first, *own)))

    def _is_late(self, one: Checkpoint) -> bool:
        """Set aside what a submission that this one has replaced wrote after that."""
        if not self._writer.attempt or one.folder in self._seen:
            return False
        manifest = read_manifest(self._storage, one.folder)
        writer = manifest.folder.rpartition("/attempt-")[2].split("-")[0]
        if not is_late(self._writer.attempt[:8], writer, one.folder, self._seen):
            self._seen.add(one.folder)
            return False
        own = self._writer.term
        why = f"written under term {manifest.term} by a submission that this one, with term {own}, has replaced"
        set_aside(self._storage, one.folder, [why])
        log.warning("set aside %s: %s", one.folder, why)
        return True

    def _is_own(self, one: Checkpoint) -> bool:
        """Whether a checkpoint is of this run's storage and lineage; other runs count their lineages from 0, too."""
        uri, _ = located(self._run.storage_uri, one.folder)
        return uri == self._run.storage_uri and lineage_of(one) == self._resume.lineage

    def _set_aside(self, folder: str, why: str) -> None:
        uri, inside = located(self._run.storage_uri, folder)
        is_there = uri == self._run.storage_uri and self._storage.exists(f"{inside}/{COMMIT}")
        if is_there and not self._set_aside_if_damaged(inside):
            # That worker's node may lack the mount, or have bad memory.
            seen = f"{folder} is whole as seen from here, but a worker could not use it"
            self._post(Said(f"{seen}: {shortened([why])}"))
        self._tell()

    def _set_aside_if_damaged(self, folder: str) -> bool:
        """Read a checkpoint, its manifest first; whether something was wrong with it."""
        seen = wrong_with(self._storage, folder)
        if seen:
            set_aside(self._storage, folder, seen)
            self._post(Said(f"{folder} does not verify and is set aside: {shortened(seen)}"))
        return bool(seen)

    def _set_aside_later(self, step: int) -> None:
        for checkpoint in known(self._storage):
            if checkpoint.step > step and lineage_of(checkpoint) == self._resume.lineage:
                set_aside(self._storage, checkpoint.folder, [f"the run went back to step {step}"], undone=True)
                log.warning("set aside %s: its steps were undone", checkpoint.folder)
        self._tell()

    def _sweep(self, below: int | None, written: Collection[int] = ()) -> None:
        """Remove what was begun and never committed, of steps below `below` or of all, but not of those in `written`,
        whose parts are on their way; and abort the uploads that were left there."""
        lineage = f"lineage-{self._resume.lineage:03d}"

        def is_left(name: str) -> bool:
            number = name.removeprefix("step-")
            return number.isdigit() and int(number) not in written and (below is None or int(number) < below)

        for upload in self._storage.uploads(FOLDER):  # of a step without an object there is no folder
            name, of_lineage = upload.path.split("/")[1:3]
            if is_left(name) and of_lineage == lineage:
                self._storage.abort(upload)
        for name in filter(is_left, self._storage.folders(FOLDER)):
            folder = f"{FOLDER}/{name}/{lineage}"
            files = [file for file, _ in self._storage.names(folder)]
            if files and not any(file.endswith(".json") for file in files):
                self._storage.remove_folder(folder)
                if not self._storage.folders(f"{FOLDER}/{name}"):
                    self._storage.remove_folder(f"{FOLDER}/{name}")

    def _abort_old_uploads(self) -> None:
        """Abort uploads that earlier submissions left, which no listing of objects shows: of checkpoints, whose writers
        are gone, and of weights that nobody has gone on with for an hour."""
        own, stale_unix_s = f"/attempt-{self._writer.attempt[:8]}-", time.time() - UNFINISHED_AFTER_S

        def is_old(upload: Upload) -> bool:
            if upload.path.startswith(f"{FOLDER}/"):
                return not self._writer.attempt or own not in upload.path
            return upload.path.startswith(WEIGHTS_FOLDER) and upload.begun_unix_s <= stale_unix_s

        old = [upload for upload in self._storage.uploads() if is_old(upload)]
        for upload in old:
            self._storage.abort(upload)
        if old:
            log.info("aborted %d upload(s) that earlier submissions left in %s", len(old), self._storage.uri)

    def _failed(self, step: int, why: str) -> None:
        self._tries.failed()
        self._post(CheckpointFailed(step, why))
