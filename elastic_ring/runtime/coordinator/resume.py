"""Where a submission begins: the checkpoints of its run, or of another, that it may use, by the lineage they belong to.

Asked by the driver before anything starts, and by the coordinator's keeper of checkpoints. Nothing is written here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from elastic_ring.config import RunConfig
from elastic_ring.control.decisions import rollback
from elastic_ring.control.decisions.corpus import journalled
from elastic_ring.control.messages import BatchSkip, Checkpoint, CorpusVersion
from elastic_ring.control.replay import standing
from elastic_ring.errors import CheckpointDamaged, RecordDamaged, StorageFailed
from elastic_ring.files import name_below, shown_url
from elastic_ring.mesh import Mesh
from elastic_ring.monitor.journal import salvage
from elastic_ring.monitor.json_files import as_written, parse_json
from elastic_ring.monitor.metrics import JOURNAL_NAME, METRICS_NAME
from elastic_ring.runtime.identity import Identity
from elastic_ring.runtime.run_storage import growing
from elastic_ring.state.checkpoints.checkpoint import committed, wrong_with
from elastic_ring.state.checkpoints.manifest import COMMIT, FOLDER, REJECTED, Manifest, age_key, located, read_manifest
from elastic_ring.state.storage.folder import Storage, open_or_refuse
from elastic_ring.wording import cut, few


@dataclass(frozen=True)
class Earlier:
    """The later manifests that were decided, how many steps ran, from step 0 on, and which batches are left out; None
    where no records say."""

    corpus: tuple[CorpusVersion, ...] = ()
    num_steps: int = 0
    skips: tuple[BatchSkip, ...] | None = None


def earlier(storage: Storage, lineage: int, identity: str, damaged: dict[str, str]) -> Earlier:
    """The records of the last submission of `lineage`, which took over those before it.

    Empty where its records are no longer in `storage` (an object store keeps only the last submission's), or where they
    belong to another `identity`. Damaged lines are left out, and named in `damaged`, by file.
    Raises StorageFailed.
    """
    attempts = [f"{name}/" for name in storage.folders() if name.startswith("attempt-")]
    for folder in ("", *reversed(attempts)):
        name = folder + JOURNAL_NAME
        lines = standing(_records(storage, name, damaged))
        begin = next((line for line in lines if line.get("note") == "begin"), None)
        if begin is None or begin.get("lineage", 0) != lineage or begin.get("identity", identity) != identity:
            continue
        steps = [line.get("step") for line in _records(storage, folder + METRICS_NAME, damaged) if "loss_hex" in line]
        ran = [step + 1 for step in steps if type(step) is int]
        try:
            return Earlier(journalled(lines), max([*ran, begin.get("num_steps", 0)]), rollback.journalled(lines))
        except (LookupError, TypeError, AttributeError) as error:
            damaged[name] = f"{storage.at(name)} holds something else ({type(error).__name__}: {error})"
    return Earlier()


def _records(storage: Storage, name: str, damaged: dict[str, str]) -> list[dict[str, Any]]:
    try:
        lines, wrong = salvage(growing(storage, name))
    except RecordDamaged as error:
        damaged[name] = error.message
        return []
    if wrong:
        damaged[name] = (
            f"line {wrong[0].line} of {storage.at(name)} {wrong[0].problem}: which sequences the steps after the "
            "checkpoint used is known from the other lines only"
        )
    return lines


LINEAGES = "lineages"
LENGTHS = ("total_steps", "warmup_steps")
NUM_TOLD, LONGEST_TOLD = 3, 200
"""The most findings of a report of damage, and characters of each."""


@dataclass(frozen=True)
class Resume:
    """Where a submission begins. `checkpoints`: those that may be used, by step; empty for step 0."""

    lineage: int = 0
    checkpoints: tuple[Checkpoint, ...] = ()
    resumed_from: tuple[Mapping[str, Any], ...] = ()
    """The resumes so far, this one last: {"step", "path"}."""
    corpus: tuple[CorpusVersion, ...] = ()
    """The later manifests of the corpus: those at that checkpoint, and those that earlier submissions took after it."""
    num_steps: int = 0
    """How many steps earlier submissions ran, where the corpus may grow: these use the same sequences again."""
    skips: tuple[BatchSkip, ...] = ()
    """The batches that are left out: by the settings, and by earlier submissions that went back."""
    excludes: bool = True
    """Whether the run's storage keeps two writers of one name apart, as the driver has tried."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Where the contents were when the newest checkpoint was written."""
    sequences_per_pass: int | None = None
    """As that checkpoint's manifest says."""
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Why checkpoints and records do not count, by name; by URI where they lie in another storage than the run's."""

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
    """The checkpoints that count, of all lineages, by lineage and step. Those that are damaged are left out."""
    return listed(storage)[0]


def listed(storage: Storage) -> tuple[list[Checkpoint], dict[str, str]]:
    """As `known`, and why others do not count, by folder: their manifest is damaged, or of another folder."""
    manifests, damaged = _manifests(storage)
    return list(manifests), damaged


def _manifests(storage: Storage) -> tuple[dict[Checkpoint, Manifest], dict[str, str]]:
    found: dict[Checkpoint, Manifest] = {}
    damaged: dict[str, str] = {}
    for folder in reversed(committed(storage)):
        try:
            manifest = read_manifest(storage, folder)
        except CheckpointDamaged as error:
            damaged[folder] = error.message
            continue
        except StorageFailed:
            if storage.exists(f"{folder}/{COMMIT}"):
                raise
            continue  # removed since it was listed
        found[Checkpoint(manifest.step, folder, Mesh(manifest.num_parts, manifest.cp))] = manifest
    return found, damaged


def lineage_of(checkpoint: Checkpoint) -> int:
    return lineage_of_folder(checkpoint.folder)


def lineage_of_folder(folder: str) -> int:
    """-1 if the name of the folder is not a checkpoint's."""
    return age_key(located("", folder)[1])[0]


@dataclass
class _Stored:
    """What a storage has: `found` counts as far as its manifests and names say, by lineage and step; `begun` has the
    checkpoints at which each lineage began. `damaged`: why the other checkpoints and records do not count, by name."""

    storage: Storage
    found: list[Checkpoint]
    damaged: dict[str, str]
    begun: dict[int, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, storage: Storage, identity: Identity) -> _Stored:
        manifests, damaged = _manifests(storage)
        strangers = [one for one, manifest in manifests.items() if _other_settings(manifest, identity)]
        if len(strangers) == len(manifests):  # these are the run's, and the settings are others: `_resume` says so
            strangers = []
        damaged |= {one.folder: f"{storage.at(one.folder)} is a checkpoint of other settings" for one in strangers}
        stored = cls(storage, [one for one in manifests if one not in strangers], damaged)
        stored._read_lineages(identity.digest)
        return stored

    def _read_lineages(self, identity: str) -> None:
        for name, _ in self.storage.names(LINEAGES):
            number = re.fullmatch(rf"{LINEAGES}/(\d+)\.json", name)
            if number is None:  # one that was set aside
                continue
            try:
                begun = parse_json(self.storage.read_record(name), self.storage.at(name))
                if begun.get("identity", identity) != identity:
                    raise RecordDamaged(f"{self.storage.at(name)} is another run's", path=name)
                with as_written(self.storage.at(name)):
                    self.begun[int(number[1])] = [
                        _checkpoint_name(folder, self.storage.at(name)) for folder in begun["from"]
                    ]
            except RecordDamaged as error:
                self.damaged[name] = error.message

    @property
    def newest(self) -> int:
        """The newest lineage, -1 for none."""
        names = [*self.damaged, *(one.folder for one in self.found)]
        records = (re.fullmatch(rf"{LINEAGES}/(\d+)\.json", name) for name in names)
        return max([*self.begun, *map(lineage_of_folder, names), *(int(one[1]) for one in records if one)], default=-1)

    def whole(self, candidates: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Without the newest ones that lack a file or a part of one; what each byte is shows when it is read."""
        left = list(candidates)
        while left and (wrong := wrong_with(self.storage, left[-1].folder, read_bytes=False)):
            self.damaged[left.pop().folder] = shortened(wrong)
        return left


def find_resume(run: RunConfig, identity: Identity, *, grows: bool = False) -> Resume:
    """Where a submission with these settings begins, by `run.resume`. `grows`: the corpus may grow while it trains.

    Without earlier submissions the settings say which batches are left out.

    Raises: ValueError for a step without a checkpoint, a path that is none, and a checkpoint of another run's settings
    (it names what differs) or of a newer format; StorageFailed.
    """
    writes = not Storage(run.storage_uri).is_local  # a folder is tried elsewhere
    storage = open_or_refuse(run.storage_uri, write=writes, timeout_s=run.timeouts.storage_s)
    reads = grows or goes_back(run)
    return replace(_found_resume(run, storage, identity, reads), excludes=storage.excludes)


def _found_resume(run: RunConfig, storage: Storage, identity: Identity, reads: bool) -> Resume:
    stored = _Stored.of(storage, identity)
    newest = stored.newest
    if run.resume == "never":
        return Resume(newest + 1, skips=skips_of(run))
    if run.resume == "auto":
        usable = _newest_whole(run, stored)
        before = earlier(storage, max(newest, 0), identity.digest, stored.damaged) if reads else Earlier()
        found = _resume(run, storage, usable, max(newest, 0), identity, before)
        return replace(found, damaged=stored.damaged)
    if run.resume.isdigit():
        usable = stored.whole([checkpoint for checkpoint in stored.found if checkpoint.step == int(run.resume)])[-1:]
        if not usable:
            steps = ", ".join(str(checkpoint.step) for checkpoint in stored.found)
            raise ValueError(
                f"resume={run.resume!r}: no checkpoint of that step in {storage.uri}; "
                f"there are {steps or 'none'}{_and_damaged(stored.damaged)}"
            )
        before = earlier(storage, lineage_of(usable[-1]), identity.digest, stored.damaged) if reads else Earlier()
        found = _resume(run, storage, usable, newest + 1, identity, before)
        return replace(found, damaged=stored.damaged)
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


def _newest_whole(run: RunConfig, stored: _Stored) -> list[Checkpoint]:
    """The checkpoints that a submission may use: those of the newest lineage; where that has none, the one at which it
    began; where that is not known, or its own are damaged, those of the lineages before. None for step 0.

    Raises ValueError where there were checkpoints and none is left: a run must not begin at step 0 again without a
    word after a week of training; and where somebody chose one that is not there any more.
    """
    newest = stored.newest
    usable = stored.whole([one for one in stored.found if lineage_of(one) == newest])
    begun_from, lost = stored.begun.get(newest, ()), _lost(stored, newest)
    if usable:  # where no byte of them is right, the one at which they began is left
        return [*(one for one in stored.found if one.folder in begun_from and one.step < usable[0].step), *usable]
    if newest in stored.begun and not begun_from and not lost:
        return []
    usable = _beginning_of(run, stored, begun_from)
    others = {lineage_of(one) for one in stored.found} - {newest} if lost or newest not in stored.begun else set[int]()
    for lineage in sorted(others, reverse=True):
        usable = usable or stored.whole([one for one in stored.found if lineage_of(one) == lineage])
    if usable or not (lost or begun_from):
        return usable
    if lost:
        raise ValueError(
            f"resume='auto': every checkpoint in {stored.storage.uri} was set aside or is damaged ({len(lost)}; "
            f"elastic-ring checkpoints list says why{_and_damaged(stored.damaged)}): give resume='never' to begin at "
            "step 0, or the path of another run's checkpoint"
        )
    raise ValueError(
        f"resume='auto': the newest lineage has no checkpoint yet, and {begun_from[-1]}, at which it began, is not "
        "there any more or is damaged: give resume='never' to begin at step 0, a step, or the path of a checkpoint"
    )


def _lost(stored: _Stored, lineage: int) -> list[str]:
    """The checkpoints of a lineage that do not count any more."""
    ending = f"/lineage-{lineage:03d}/"
    aside = [name for name, _ in stored.storage.names(FOLDER) if name.endswith(REJECTED) and ending in name]
    return [*aside, *(name for name in stored.damaged if lineage_of_folder(name) == lineage >= 0)]


def _and_damaged(damaged: Mapping[str, str]) -> str:
    return "; " + shortened(damaged.values()) if damaged else ""


def shortened(lines: Iterable[str]) -> str:
    """The first of them, and how many more there are, for one line."""
    return few((cut(line, LONGEST_TOLD) for line in lines), NUM_TOLD, "; ")


def _beginning_of(run: RunConfig, stored: _Stored, begun_from: Sequence[str]) -> list[Checkpoint]:
    """The checkpoint that a lineage began at, of this storage or of one beside it; none where it is not there any more.

    Raises ValueError for another one: a record, which may be a stranger's, does not say what is opened as this user.
    """
    usable = []
    for path in begun_from:
        uri, folder = located("", path)
        if uri and uri.rpartition("/")[0] != stored.storage.uri.rstrip("/").rpartition("/")[0]:
            raise ValueError(
                f"resume='auto': the newest lineage in {stored.storage.uri} has no checkpoint yet, and began at "
                f"{shown_url(path)}, says its record: give resume={shown_url(path)!r} if you know that place"
            )
        if uri:
            storage = open_or_refuse(uri, write=False, timeout_s=run.timeouts.storage_s, setting="resume")
            usable += [Checkpoint(one.step, path, one.mesh) for one in known(storage) if one.folder == folder]
        else:
            usable += stored.whole([one for one in stored.found if one.folder == path])
    return usable


def _checkpoint_name(given: object, where: str) -> str:
    """`given` if it names a checkpoint, in this storage or, with a whole path, in another. Raises RecordDamaged."""
    uri, folder = located("", given) if isinstance(given, str) else ("", "")
    try:
        name_below(folder, where)
        is_name = lineage_of_folder(folder) >= 0 and uri.isprintable() and uri.rpartition("/")[2] not in (".", "..")
    except ValueError:
        is_name = False
    if not is_name:
        raise RecordDamaged(f"{where} names {cut(ascii(given), LONGEST_TOLD)}, which is no checkpoint", path=where)
    return str(given)


def lineage_name(lineage: int) -> str:
    return f"{LINEAGES}/{lineage:03d}.json"


def _resume_from(run: RunConfig, lineage: int, identity: Identity, reads: bool) -> Resume:
    """From a path: of one checkpoint, or of a run, whose newest is taken."""
    uri, folder = located("", run.resume.rstrip("/"))
    where = uri or run.resume.rstrip("/")
    storage = open_or_refuse(where, write=False, timeout_s=run.timeouts.storage_s, setting="resume")
    stored = _Stored.of(storage, identity)
    usable = stored.whole([one for one in stored.found if one.folder == folder or not uri])[-1:]
    if not usable:
        raise ValueError(
            f"resume={run.resume!r}: there is no checkpoint; give auto, never, a step, or the path of a "
            f"run or of one of its checkpoints (elastic-ring checkpoints list PATH)"
            f"{_and_damaged(stored.damaged)}"
        )
    whole = [Checkpoint(one.step, uri_of(storage, one.folder), one.mesh) for one in usable]
    before = earlier(storage, lineage_of(usable[-1]), identity.digest, stored.damaged) if reads else Earlier()
    found = _resume(run, storage, whole, lineage, identity, before)
    return replace(found, damaged={uri_of(storage, name): why for name, why in stored.damaged.items()})


def _resume(
    run: RunConfig, storage: Storage, usable: Sequence[Checkpoint], lineage: int, identity: Identity, before: Earlier
) -> Resume:
    skips = skips_of(run) if before.skips is None else before.skips
    if not usable:
        return Resume(lineage, corpus=before.corpus, num_steps=before.num_steps, skips=skips)
    newest = usable[-1]
    uri, folder = located(storage.uri, newest.folder)
    if uri != storage.uri:
        storage = Storage(uri, timeout_s=storage.timeout_s).open(write=False)
    manifest = read_manifest(storage, folder)
    if told := _other_settings(manifest, identity):
        raise ValueError(
            f"{uri_of(storage, folder)} is a checkpoint of other settings ({few(told, NUM_TOLD, '; ')}): "
            "submit the same, choose "
            f"another run name, or give resume='never' in a new storage_path{_lengths(manifest, told)}"
        )
    resumed_from = (*manifest.run.get("resumed_from", ()), {"step": newest.step, "path": uri_of(storage, folder)})
    by_then = tuple(CorpusVersion(**version) for version in manifest.run.get("corpus", ()))
    corpus = max(by_then, before.corpus, key=len)  # of one lineage, so the longer begins with the shorter
    if before.skips is None and "skips" in manifest.run:
        skips = tuple(BatchSkip(**skip) for skip in manifest.run["skips"])
    return Resume(
        lineage,
        tuple(usable),
        resumed_from,
        corpus,
        before.num_steps,
        skips,
        places=manifest.run.get("places", {}),
        sequences_per_pass=manifest.run.get("sequences_per_pass"),
    )


def _lengths(manifest: Manifest, told: Sequence[str]) -> str:
    """The way out for a longer run, whose schedule follows its steps where nobody says otherwise: as flags."""
    there = {name: str(manifest.run.get("settings", {}).get(f"optim.{name}")) for name in LENGTHS}
    other = {one.partition(":")[0] for one in told}
    if not other <= {f"optim.{name}" for name in LENGTHS}:
        return ""
    flags = " ".join(f"--optim.{name.replace('_', '-')} {value}" for name, value in there.items())
    return f"; for more steps at the rate with which its schedule ended give {flags}"


def _other_settings(manifest: Manifest, identity: Identity) -> list[str]:
    return [] if manifest.identity == identity.digest else identity.differences(manifest.run.get("settings", {}))


def uri_of(storage: Storage, name: str) -> str:
    return f"{storage.uri.rstrip('/')}/{name}"
