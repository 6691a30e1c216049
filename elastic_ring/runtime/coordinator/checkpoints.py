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

from elastic_ring.config import RunConfig
from elastic_ring.control.decisions.terms import is_late
from elastic_ring.control.messages import Checkpoint
from elastic_ring.errors import CheckpointDamaged, StaleMessage, StorageFailed, TermLost
from elastic_ring.monitor.json_files import DAMAGED, json_bytes
from elastic_ring.monitor.metrics import CheckpointEvent, ResumePoint
from elastic_ring.runtime.agent.messages import Said
from elastic_ring.runtime.coordinator.inbox import CheckpointCounts, CheckpointFailed, CheckpointsListed, Put
from elastic_ring.runtime.coordinator.resume import (
    Resume,
    lineage_of,
    scan_checkpoints,
    shortened,
    uri_of,
)
from elastic_ring.runtime.notices import CheckpointLeftOut, CheckpointPart
from elastic_ring.state.checkpoints.checkpoint import commit, committed, set_aside, wrong_with
from elastic_ring.state.checkpoints.manifest import (
    COMMIT,
    FOLDER,
    LINEAGES,
    Manifest,
    age_key,
    lineage_name,
    located,
    read_manifest,
)
from elastic_ring.state.checkpoints.retention import KEPT_NAME, UNFINISHED_AFTER_S, keep, kept_checkpoint, prune
from elastic_ring.state.checkpoints.weight_files import WEIGHTS_FOLDER
from elastic_ring.state.storage.backend import Retries
from elastic_ring.state.storage.folder import Storage, now_unix_s

log = logging.getLogger(__name__)

PRIOR_FAILURE_S = 86_400.0
"""Time in which one failure is assumed beside those that were seen."""
RETRY_S = 96.0
"""For how long a job that the storage refused is tried again, besides the `storage_s` of each request."""
ASK_AGAIN_S = 60.0
"""From a checkpoint that was not written to the next try, where the next one is due later."""
READ_BACK_BYTES = 2 << 30
"""The largest checkpoint that is read back before an older one is removed."""


@dataclass(frozen=True)
class Writer:
    """The author of the manifests.

    `facts`: of the run, for readers of a manifest. `attempt`: this submission's. `resumed_from` returns the checkpoints
    at which this run has begun; `data` the later manifests of a growing corpus and the batches left out, each with its
    first step. Before each manifest, `recorded` returns once the records are in storage, and `inject` fires the faults
    planned before the manifest of a step.
    """

    term: int
    identity: str
    facts: Mapping[str, object] = field(default_factory=dict)
    attempt: str = ""
    resumed_from: Callable[[], Sequence[ResumePoint]] = tuple
    data: Callable[[], Mapping[str, Sequence[object]]] = dict
    recorded: Callable[[], None] = lambda: None
    inject: Callable[[int], None] = lambda step: None


@dataclass
class _Pending:
    """The parts of one checkpoint that have been written, by `cp_rank` and `dp_rank`."""

    parts: dict[tuple[int, int], CheckpointPart] = field(default_factory=dict)
    error: str = ""

    @property
    def head(self) -> CheckpointPart | None:
        """The part that describes the whole checkpoint."""
        return next((part for part in self.parts.values() if part.tensors is not None), None)

    def is_complete(self) -> bool:
        return not self.error and self.head is not None and len(self.parts) == self.head.mesh.size


@dataclass
class Tries:
    """Outcomes of the tries to write a checkpoint. Times are those of the monotonic clock."""

    storage_s: float
    failing_since: float | None = None
    commit_since: float | None = None  # the oldest that is queued or under way
    tried_at: float = 0.0

    def failed(self) -> None:
        self.tried_at = time.monotonic()
        self.failing_since = self.failing_since or self.tried_at

    @property
    def failing_s(self) -> float:
        """For how long none could be written although one was tried. A listing that fails is no such try."""
        since, queued = self.failing_since, self.commit_since
        if since is None and queued is not None and time.monotonic() - queued > self.storage_s:
            since = queued  # a store that hangs fails nothing
        return 0.0 if since is None else time.monotonic() - since

    def take_retry(self) -> bool:
        """Whether to take a checkpoint now because the last one was not written: once in ASK_AGAIN_S."""
        if self.failing_since is None or time.monotonic() - self.tried_at < ASK_AGAIN_S:
            return False
        self.tried_at = time.monotonic()
        return True


class CheckpointKeeper:
    """Collects the parts of a run's checkpoints and has a thread commit them. `post` puts results into the deciding
    thread's queue: a checkpoint that counts; all that count, by step; why one was not written; lines for the driver."""

    def __init__(
        self, run: RunConfig, resume: Resume, writer: Writer, post: Put, ask: Callable[[], None] = lambda: None
    ) -> None:
        """`ask` looks for a newer term in the storage before each write or removal, and raises StaleMessage or TermLost
        if there is one."""
        self._lineage, self._post, self._ask = resume.lineage, post, ask
        self.tries = Tries(run.timeouts.storage_s)
        self.stored = StoredCheckpoints(run, resume, writer, post, ask)
        self._pending: dict[tuple[int, tuple[int, int]], _Pending] = {}  # by step and membership
        self._oldest = (0, 0)
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
        self._closing = threading.Event()

    def open(self) -> None:
        """Start the thread, and have it post the checkpoints that count."""
        self._thread.start()
        for job in (self.stored.set_damaged_aside, self.stored.begin_lineage, self.stored.abort_old_uploads):
            self._jobs.put(job)
        self._jobs.put(self.stored.post_list)

    def close(self, timeout_s: float, *, prunes: bool = False) -> bool:
        """End the work under way, remove files that will never count, and stop. Returns whether that is done in time.
        `prunes`: apply retention to a checkpoint that counts only now, as `clean` will not be called for it."""
        if not self._thread.is_alive():
            return True
        self._closing.set()
        if prunes:
            self._jobs.put(self.stored.prune_own)
        self._jobs.put(lambda: self.stored.sweep(None))
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """The run is another submission's: do no queued job, and remove nothing."""
        self._closing.set()
        self._jobs.put(None)

    # ------------------------------------------------------------ the deciding thread

    @property
    def has_parts(self) -> bool:
        return bool(self._pending)

    def written(self, part: CheckpointPart | CheckpointLeftOut) -> None:
        """Take a rank's part, or its error. Parts of members that have gone back do not count."""
        is_late = part.membership_id < self._oldest
        if isinstance(part, CheckpointLeftOut):
            if not is_late:
                self._failed(part.step, part.reason)
            return
        if is_late or part.lineage != self._lineage:
            log.info("ignored a late part of the checkpoint of step %d, membership %s", part.step, part.membership_id)
            return
        pending = self._pending.setdefault((part.step, part.membership_id), _Pending())
        if part.error and not pending.error:
            pending.error = f"cp_rank {part.cp_rank}: {part.error}"
            self._failed(part.step, pending.error)
        pending.parts[part.cp_rank, part.dp_rank] = part

    def look(self, last_step: int) -> None:
        """Commit what is complete and whose steps are all recorded: `last_step` is the last that is."""
        for key in sorted(self._pending):
            step, pending = key[0], self._pending[key]
            if not pending.is_complete() or last_step < step - 1:
                continue
            for earlier in [other for other in self._pending if other <= key]:
                del self._pending[earlier]
            self.tries.commit_since = self.tries.commit_since or time.monotonic()
            self._jobs.put(partial(self._commit, step, pending))
            return

    def clean(self, step: int) -> None:
        """A checkpoint of `step` counts and the core knows it: remove what retention does not keep, and leftovers."""
        self._jobs.put(partial(self.stored.clean, step, {step for step, _ in self._pending}))

    def keep(self, step: int) -> None:
        """Once the checkpoint of `step` counts, retention leaves it, and none that was kept before."""
        self._jobs.put(partial(self.stored.keep, step))

    def gone_back(self, step: int, membership_id: tuple[int, int]) -> None:
        """The members (term, generation) begin at the checkpoint of `step`: later ones do not count."""
        self._oldest = max(self._oldest, membership_id)
        self._pending = {key: value for key, value in self._pending.items() if key[1] >= membership_id}
        self._jobs.put(partial(self.stored.set_aside_later, step))

    def damaged(self, folder: str, reason: str) -> None:
        """A checkpoint did not verify: its files stay, but it does not count any more."""
        self._jobs.put(partial(self.stored.set_aside, folder, reason))

    def _failed(self, step: int, reason: str) -> None:
        self.tries.failed()
        self._post(CheckpointFailed(step, reason))

    # ------------------------------------------------------------ the keeper's thread

    def _work(self) -> None:
        def attempt(job: Callable[[], None]) -> None:
            self.stored.storage.open(write=False)
            self._ask()
            job()

        while (job := self._jobs.get()) is not None:
            try:
                Retries(RETRY_S, pause=self._closing.wait)(
                    partial(attempt, job), lambda error: not isinstance(error, (StorageFailed, CheckpointDamaged))
                )
            except (StaleMessage, TermLost) as error:
                log.warning("the checkpoints' thread ends: %s", error)
                return  # the deciding thread looks by itself, and gets the error
            except (StorageFailed, CheckpointDamaged) as error:
                log.warning("%s; given up", error)
            except Exception:
                log.exception("the checkpoints' thread goes on after an error")

    def _commit(self, step: int, pending: _Pending) -> None:
        head = pending.head
        assert head is not None
        parts = [pending.parts[key] for key in sorted(pending.parts)]
        try:
            event: CheckpointEvent | str = "its members have gone back to an earlier step"
            if head.membership_id >= self._oldest:
                event = self.stored.commit(head, parts)
        except (StaleMessage, TermLost):
            raise
        except Exception as error:
            if not pending.error:
                pending.error = str(error)
                self._failed(step, pending.error)
            raise
        self.tries.commit_since = None
        if isinstance(event, str):
            if event:
                self._failed(step, event)
            return
        self.tries.failing_since = None
        if head.interval:
            self._post(Said(head.interval))
        self._post(CheckpointCounts(event))
        self._jobs.put(self.stored.post_list)  # a job of its own: trying it again must not commit again


class StoredCheckpoints:
    """The checkpoints of a run in its storage. Each method may take long; the keeper's thread alone calls them."""

    def __init__(self, run: RunConfig, resume: Resume, writer: Writer, post: Put, ask: Callable[[], None]) -> None:
        self._run, self._resume, self._writer, self._post, self._ask = run, resume, writer, post, ask
        self.config = run.checkpoint_config
        self.storage = Storage(run.storage_uri, resume.excludes, run.timeouts.storage_s)
        self._verified = {checkpoint.folder for checkpoint in resume.checkpoints}  # written by no replaced submission
        own = [checkpoint for checkpoint in resume.checkpoints if self._is_own(checkpoint)]
        self._read_back = own[-1].step if own else None  # the newest step of which every byte was read
        self._kept: int | None = None  # the step whose checkpoint is to stay
        self._pruned: str | None = None  # the newest checkpoint when older ones were last removed

    def commit(self, head: CheckpointPart, parts: Sequence[CheckpointPart]) -> CheckpointEvent | str:
        """Write the manifest. Returns the checkpoint that counts; else why not, empty if it counts already."""
        assert head.tensors is not None
        assert head.meta is not None
        manifest = Manifest(
            step=head.step,
            lineage=self._resume.lineage,
            term=self._writer.term,
            identity=self._writer.identity,
            folder=head.folder,
            cp=head.mesh.cp,
            num_parts=head.mesh.dp,
            files=tuple(part.file for part in parts if part.file is not None),
            tensors=head.tensors,
            meta=head.meta,
            run={
                **self._writer.facts,
                "resumed_from": list(self._writer.resumed_from()),
                **{name: value for name, value in self._writer.data().items() if value},
            },
        )
        begun = time.monotonic()
        self._writer.recorded()  # what comes before a checkpoint must outlive the cluster too
        self._check_files(manifest)
        self._writer.inject(head.step)
        self._ask()
        folder = manifest.folder.rpartition("/")[0]
        # It may be there: this one, where an earlier try wrote it and then failed, or another writer's.
        if not commit(self.storage, manifest) and (there := read_manifest(self.storage, folder).folder) != head.folder:
            self.storage.remove_folder(head.folder)
            # Members that begin at a step may save it once more, since a callback wants it.
            is_ours = self._writer.attempt and f"/attempt-{self._writer.attempt[:8]}-" in there
            return "" if is_ours else "there is one already, of another writer"
        if head.step == self._kept:
            keep(self.storage, head.step, self._resume.lineage)
        return {
            "step": head.step,
            "path": uri_of(self.storage, folder),
            "bytes": manifest.num_bytes,
            "blocked_s": max(part.blocked_s for part in parts),
            "total_s": max(part.total_s for part in parts) + time.monotonic() - begun,
        }

    def _check_files(self, manifest: Manifest) -> None:
        """Raises StorageFailed unless all files are there as this node sees them, each with its size."""
        sizes = dict(self.storage.names(manifest.folder))
        for file in manifest.files:
            if sizes.get(file.name) != file.num_bytes:
                seen = "missing" if file.name not in sizes else f"of {sizes[file.name]} bytes"
                raise StorageFailed(
                    f"{uri_of(self.storage, file.name)} is {seen} on the coordinator's node, a worker wrote "
                    f"{file.num_bytes} bytes: storage_path must be one place for all nodes",
                    path=file.name,
                )

    def keep(self, step: int) -> None:
        """`step`: of a checkpoint that may not count yet."""
        self._kept = step
        if any(age_key(folder) == (self._resume.lineage, step) for folder in committed(self.storage)):
            keep(self.storage, step, self._resume.lineage)

    def post_list(self) -> None:
        """Post the checkpoints that this submission may use."""
        valid, damaged = scan_checkpoints(self.storage)
        for folder in damaged:
            if lineage_of(folder) >= 0:  # other names are none of the run's
                self._set_aside_if_damaged(folder)
        first = [checkpoint for checkpoint in self._resume.checkpoints if not self._is_own(checkpoint)]
        own = [c for c in valid if lineage_of(c.folder) == self._resume.lineage and not self._is_late(c)]
        self._post(CheckpointsListed((*first, *own)))

    def _is_late(self, checkpoint: Checkpoint) -> bool:
        """Set a checkpoint aside that a replaced submission wrote after its replacement; returns whether it is one."""
        if not self._writer.attempt or checkpoint.folder in self._verified:
            return False
        manifest = read_manifest(self.storage, checkpoint.folder)
        writer = manifest.folder.rpartition("/attempt-")[2].split("-")[0]
        if not is_late(self._writer.attempt[:8], writer, checkpoint.folder, self._verified):
            self._verified.add(checkpoint.folder)
            return False
        own = self._writer.term
        reason = f"written under term {manifest.term} by a submission that this one, with term {own}, has replaced"
        set_aside(self.storage, checkpoint.folder, [reason])
        log.warning("set aside %s: %s", checkpoint.folder, reason)
        return True

    def _is_own(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint is of this run's storage and lineage; other runs count their lineages from 0, too."""
        uri, _ = located(self._run.storage_uri, checkpoint.folder)
        return uri == self._run.storage_uri and lineage_of(checkpoint.folder) == self._resume.lineage

    # ------------------------------------------------------------ the beginning

    def set_damaged_aside(self) -> None:
        """Verify what the driver found damaged: checkpoints that are seen from here too, and records of lineages."""
        for name, reason in self._resume.damaged.items():
            if name.startswith(f"{LINEAGES}/") and self.storage.exists(name):
                self.storage.create(f"{name}{DAMAGED}{secrets.token_hex(4)}", self.storage.read_record(name))
                self.storage.remove(name)
            elif lineage_of(name) >= 0 and self.storage.exists(f"{name}/{COMMIT}"):
                seen = wrong_with(self.storage, name)
                if seen or read_manifest(self.storage, name).identity != self._writer.identity:
                    set_aside(self.storage, name, seen or [reason])

    def begin_lineage(self) -> None:
        """So that a later submission goes on in this lineage, also where it has no checkpoint yet."""
        before = [located(self.storage.uri, c.folder) for c in self._resume.checkpoints if not self._is_own(c)]
        # A checkpoint of this storage by its name in it, which stays where the storage moves.
        paths = [folder if uri == self.storage.uri else f"{uri}/{folder}" for uri, folder in before[-1:]]
        begun = {"resume": self._run.resume, "from": paths, "identity": self._writer.identity}
        self.storage.create(lineage_name(self._resume.lineage), json_bytes(begun))

    def abort_old_uploads(self) -> None:
        """Abort uploads that earlier submissions left, which no listing of objects shows: of checkpoints, whose writers
        are gone, and of weights that nobody has gone on with for an hour."""
        attempt, num_aborted = self._writer.attempt, 0
        uploads = self.storage.uploads()
        stale_s = now_unix_s(self.storage) - UNFINISHED_AFTER_S if uploads else 0.0
        for upload in uploads:
            if upload.path.startswith(f"{FOLDER}/"):
                is_old = not attempt or f"/attempt-{attempt[:8]}-" not in upload.path
            else:
                is_old = upload.path.startswith(WEIGHTS_FOLDER) and upload.begun_unix_s <= stale_s
            if is_old:
                self.storage.abort(upload)
                num_aborted += 1
        if num_aborted:
            log.info("aborted %d upload(s) that earlier submissions left in %s", num_aborted, self.storage.uri)

    # ------------------------------------------------------------ what does not count any more

    def set_aside(self, folder: str, reason: str) -> None:
        """A worker could not use a checkpoint: it counts no more if it is damaged as seen from here, too."""
        uri, inside = located(self._run.storage_uri, folder)
        is_there = uri == self._run.storage_uri and self.storage.exists(f"{inside}/{COMMIT}")
        if is_there and not self._set_aside_if_damaged(inside):
            # That worker's node may lack the mount, or have bad memory.
            seen = f"{folder} is whole as seen from here, but a worker could not use it"
            self._post(Said(f"{seen}: {shortened([reason])}"))
        self.post_list()

    def _set_aside_if_damaged(self, folder: str) -> bool:
        """Read a checkpoint, its manifest first; returns whether it was damaged."""
        seen = wrong_with(self.storage, folder)
        if seen:
            set_aside(self.storage, folder, seen)
            self._post(Said(f"{folder} does not verify and is set aside: {shortened(seen)}"))
        return bool(seen)

    def set_aside_later(self, step: int) -> None:
        """Set the checkpoints of later steps aside: the run went back to `step`."""
        for checkpoint in scan_checkpoints(self.storage)[0]:
            if checkpoint.step > step and lineage_of(checkpoint.folder) == self._resume.lineage:
                set_aside(self.storage, checkpoint.folder, [f"the run went back to step {step}"], undone=True)
                log.warning("set aside %s: its steps were undone", checkpoint.folder)
        self.post_list()
        self._kept = None if self._kept is not None and self._kept > step else self._kept
        kept = kept_checkpoint(self.storage)
        if kept is not None and kept[0] in (None, self._resume.lineage) and kept[1] > step:  # it is undone
            self.storage.remove(KEPT_NAME)

    def clean(self, step: int, written: Collection[int]) -> None:
        """Prune and sweep; failures to remove are logged."""
        self._prune()
        with _leave_if_refused():
            self.sweep(step, written)
        self.post_list()

    def prune_own(self) -> None:
        """Prune if a checkpoint of this submission counts that `clean` has not seen."""
        before = {checkpoint.folder for checkpoint in self._resume.checkpoints}
        if (newest := self._newest()) is not None and newest not in {*before, self._pruned}:
            self._prune()
            self.post_list()

    def _newest(self) -> str | None:
        """The folder of this lineage's newest checkpoint."""
        return next((name for name in committed(self.storage) if lineage_of(name) == self._resume.lineage), None)

    def _prune(self) -> None:
        """Remove the checkpoints that retention does not keep.

        The newest is read back first, unless it is large: then the newest that was read whole stays, too.
        """
        config = self.config
        with _leave_if_refused():
            if (folder := self._newest()) is not None:
                manifest = read_manifest(self.storage, folder)
                if manifest.num_bytes <= READ_BACK_BYTES and not self._set_aside_if_damaged(folder):
                    self._read_back = manifest.step
            prune(self.storage, config.keep_last, config.keep_every, self._resume.lineage, read_back=self._read_back)
            self._pruned = self._newest()

    def sweep(self, below: int | None, written: Collection[int] = ()) -> None:
        """Remove what was begun and never committed, of steps below `below` or of all, but not of those in `written`,
        whose parts are on their way; and abort the uploads that were left there."""
        lineage = f"lineage-{self._resume.lineage:03d}"

        def is_left(name: str) -> bool:
            number = name.removeprefix("step-")
            return number.isdigit() and int(number) not in written and (below is None or int(number) < below)

        for upload in self.storage.uploads(FOLDER):  # of a step without an object there is no folder
            name, of_lineage = upload.path.split("/")[1:3]
            if is_left(name) and of_lineage == lineage:
                self.storage.abort(upload)
        for name in filter(is_left, self.storage.folders(FOLDER)):
            folder = f"{FOLDER}/{name}/{lineage}"
            files = [file for file, _ in self.storage.names(folder)]
            if files and not any(file.endswith(".json") for file in files):
                self.storage.remove_folder(folder)
                if not self.storage.folders(f"{FOLDER}/{name}"):
                    self.storage.remove_folder(f"{FOLDER}/{name}")


@contextmanager
def _leave_if_refused() -> Iterator[None]:
    """Log where the store does not let old files be removed: the newest checkpoint counts all the same."""
    try:
        yield
    except (StorageFailed, CheckpointDamaged) as error:
        log.warning("old checkpoints could not be removed: %s", error)
