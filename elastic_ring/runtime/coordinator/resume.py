"""Where a submission begins: the checkpoints of its run, or of another, that it may use, by the lineage they belong to.

Asked by the driver before anything starts, and by the coordinator's keeper of checkpoints. Nothing is written here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from elastic_ring.config import RunConfig
from elastic_ring.control.messages import BatchSkip, Checkpoint, CorpusVersion
from elastic_ring.errors import CheckpointDamaged, StorageFailed
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.coordinator.lineage import Earlier, earlier
from elastic_ring.runtime.identity import Identity, few
from elastic_ring.state.checkpoints.checkpoint import (
    COMMIT,
    FOLDER,
    REJECTED,
    committed,
    located,
    read_manifest,
)
from elastic_ring.state.storage.folder import Storage, open_or_refuse

log = logging.getLogger(__name__)

LINEAGES = "lineages"


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
    skips: tuple[BatchSkip, ...] = ()
    """The batches that are left out: by the settings, and by earlier submissions that went back."""
    excludes: bool = True
    """Whether the run's storage keeps two writers of one name apart, as the driver has tried."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Where the contents were when the newest checkpoint was written."""

    @property
    def step(self) -> int:
        """The step that runs first, if the newest verifies."""
        return self.checkpoints[-1].step if self.checkpoints else 0

    def journalled(self) -> dict[str, Any]:
        """What the next submission needs to know of this one's beginning, for the journal's first note."""
        corpus = [asdict(version) for version in self.corpus]
        skips = [asdict(skip) for skip in self.skips]
        return {"lineage": self.lineage, "corpus": corpus, "num_steps": self.num_steps, "skips": skips}


def known(storage: Storage) -> list[Checkpoint]:
    """The checkpoints that count, of all lineages, by lineage and step. Damaged manifests are left out, and logged."""
    return listed(storage)[0]


def listed(storage: Storage) -> tuple[list[Checkpoint], list[str]]:
    """As `known`, and the folders whose manifest is damaged."""
    found, damaged = [], []
    for folder in reversed(committed(storage)):
        try:
            manifest = read_manifest(storage, folder)
        except CheckpointDamaged as error:
            log.error("%s", error)
            damaged.append(folder)
            continue
        except StorageFailed:
            if storage.exists(f"{folder}/{COMMIT}"):
                raise
            continue  # removed since it was listed
        found.append(Checkpoint(manifest.step, folder, Mesh(manifest.num_parts, manifest.cp)))
    return found, damaged


def lineage_of(checkpoint: Checkpoint) -> int:
    return lineage_of_folder(checkpoint.folder)


def lineage_of_folder(folder: str) -> int:
    return int(folder.rpartition("lineage-")[2])


def find_resume(run: RunConfig, identity: Identity, *, grows: bool = False) -> Resume:
    """Where a submission of these settings begins, as `run.resume` asks. `grows`: the corpus may grow while it trains.

    Without earlier ones the settings say which batches are left out.

    Raises: ValueError for a step without a checkpoint, a path that is none, and a checkpoint of another run's settings
    (it names what differs) or of a newer format; StorageFailed; JournalDamaged.
    """
    writes = not Storage(run.storage_uri).is_local  # a folder is tried elsewhere
    storage = open_or_refuse(run.storage_uri, write=writes, timeout_s=run.timeouts.storage_s)
    reads = grows or goes_back(run)
    return replace(_found_resume(run, storage, identity, reads), excludes=storage.excludes)


def _found_resume(
    run: RunConfig, storage: Storage, identity: Identity, reads: bool
) -> Resume:  # fmt: skip
    found, damaged = listed(storage)
    begun = {int(name[-8:-5]): json.loads(storage.read(name)) for name, _ in storage.names(LINEAGES)}
    newest = max([*begun, *map(lineage_of, found), *map(lineage_of_folder, damaged)], default=-1)
    if run.resume == "never":
        return Resume(newest + 1, skips=skips_of(run))
    if run.resume == "auto":
        usable = [checkpoint for checkpoint in found if lineage_of(checkpoint) == newest]
        if not usable:
            _refuse_where_all_are_damaged(storage, newest, damaged)
            usable = _beginning_of(run, found, begun.get(newest, {}).get("from", ()))
        before = earlier(storage, max(newest, 0)) if reads else Earlier()
        return _resume(run, storage, usable, max(newest, 0), identity, before)
    if run.resume.isdigit():
        usable = [checkpoint for checkpoint in found if checkpoint.step == int(run.resume)][-1:]
        if not usable:
            steps = ", ".join(str(checkpoint.step) for checkpoint in found)
            raise ValueError(f"resume={run.resume!r}: no checkpoint of that step in {storage.uri}; "
                             f"there are {steps or 'none'}")  # fmt: skip
        before = earlier(storage, lineage_of(usable[-1])) if reads else Earlier()
        return _resume(run, storage, usable, newest + 1, identity, before)
    return _resume_from(run, newest + 1, identity, reads)


def goes_back(run: RunConfig) -> bool:
    """Whether this run may go back on purpose, and so leave batches out."""
    return run.loss_spike == "act" and "back" in run.loss_spike_actions


def skips_of(run: RunConfig) -> tuple[BatchSkip, ...]:
    """Raises ValueError for steps that do not rise."""
    pairs = [tuple(map(int, entry.split("+"))) for entry in run.skip_batches]
    if any(later[0] <= earlier[0] for earlier, later in pairwise(pairs)):
        raise ValueError(f"skip_batches={run.skip_batches}: each entry needs a later step than the one before")
    return tuple(BatchSkip(*pair) for pair in pairs)


def _refuse_where_all_are_damaged(storage: Storage, lineage: int, damaged: Collection[str]) -> None:
    """A run must not begin at step 0 again without a word after a week of training."""
    ending = f"lineage-{lineage:03d}/"
    aside = [name for name, _ in storage.names(FOLDER) if name.endswith(REJECTED) and ending in name]
    unread = [folder for folder in damaged if lineage_of_folder(folder) == lineage]
    if aside or unread:
        number = len(aside) + len(unread)
        named = "".join(f"; the manifest in {folder} is damaged" for folder in unread)
        raise ValueError(
            f"resume='auto': every checkpoint in {storage.uri} was set aside or is damaged ({number}; elastic-ring "
            f"checkpoints list says why{named}): give resume='never' to begin at step 0, or the path of another run's "
            "checkpoint"
        )


def _beginning_of(run: RunConfig, found: Sequence[Checkpoint], begun_from: Sequence[str]) -> list[Checkpoint]:
    """The checkpoint that a lineage without one of its own began at, of this storage or of another; none for step 0.

    Raises ValueError where that checkpoint is not there any more.
    """
    usable = []
    for path in begun_from:
        uri, folder = located("", path)
        if uri:
            storage = open_or_refuse(uri, write=False, timeout_s=run.timeouts.storage_s, setting="resume")
            usable += [Checkpoint(one.step, path, one.mesh) for one in known(storage) if one.folder == folder]
        else:
            usable += [one for one in found if one.folder == path]
    if begun_from and not usable:
        raise ValueError(
            f"resume='auto': the newest lineage has no checkpoint yet, and {begun_from[-1]}, at which it began, is not "
            "there any more or is damaged: give resume='never' to begin at step 0, a step, or the path of a checkpoint"
        )
    return usable


def lineage_name(lineage: int) -> str:
    return f"{LINEAGES}/{lineage:03d}.json"


def _resume_from(run: RunConfig, lineage: int, identity: Identity, reads: bool) -> Resume:
    """From a path: of one checkpoint, or of a run, whose newest is taken."""
    uri, folder = located("", run.resume.rstrip("/"))
    where = uri or run.resume.rstrip("/")
    storage = open_or_refuse(where, write=False, timeout_s=run.timeouts.storage_s, setting="resume")
    usable = [one for one in known(storage) if one.folder == folder or not uri][-1:]
    if not usable:
        raise ValueError(f"resume={run.resume!r}: there is no checkpoint; give auto, never, a step, or the path of a "
                         "run or of one of its checkpoints (elastic-ring checkpoints list PATH)")  # fmt: skip
    whole = [Checkpoint(one.step, uri_of(storage, one.folder), one.mesh) for one in usable]
    before = earlier(storage, lineage_of(usable[-1])) if reads else Earlier()
    return _resume(run, storage, whole, lineage, identity, before)


def _resume(
    run: RunConfig, storage: Storage, usable: Sequence[Checkpoint], lineage: int, identity: Identity, before: Earlier
) -> Resume:  # fmt: skip
    skips = skips_of(run) if before.skips is None else before.skips
    if not usable:
        return Resume(lineage, corpus=before.corpus, num_steps=before.num_steps, skips=skips)
    newest = usable[-1]
    uri, folder = located(storage.uri, newest.folder)
    if uri != storage.uri:
        storage = Storage(uri, timeout_s=storage.timeout_s).open(write=False)
    manifest = read_manifest(storage, folder)
    told = [] if manifest.identity == identity.digest else identity.differences(manifest.run.get("settings", {}))
    if told:
        raise ValueError(
            f"{uri_of(storage, folder)} is a checkpoint of other settings ({few(told)}): submit the same, choose "
            "another run name, or give resume='never' in a new storage_path"
        )
    resumed_from = (*manifest.run.get("resumed_from", ()), {"step": newest.step, "path": uri_of(storage, folder)})
    by_then = tuple(CorpusVersion(**version) for version in manifest.run.get("corpus", ()))
    corpus = max(by_then, before.corpus, key=len)  # of one lineage, so the longer begins with the shorter
    if before.skips is None and "skips" in manifest.run:
        skips = tuple(BatchSkip(**skip) for skip in manifest.run["skips"])
    places = manifest.run.get("places", {})
    return Resume(lineage, tuple(usable), resumed_from, corpus, before.num_steps, skips, places=places)


def uri_of(storage: Storage, name: str) -> str:
    return f"{storage.uri.rstrip('/')}/{name}"
