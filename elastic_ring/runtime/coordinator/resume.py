"""The checkpoint at which a submission begins: of its run or of another, by the lineage they belong to.

Used by the driver before anything starts, and by the coordinator's keeper of checkpoints. Nothing is written here.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from elastic_ring.config import RunConfig
from elastic_ring.control.coordination import standing
from elastic_ring.control.decisions.data_order import journalled
from elastic_ring.control.messages import BatchSkip, Checkpoint, CorpusVersion
from elastic_ring.errors import CheckpointDamaged, RecordDamaged, StorageFailed
from elastic_ring.files import cut, few, name_below, shown_url
from elastic_ring.mesh import Mesh
from elastic_ring.monitor.journal import Flaw, Lines
from elastic_ring.monitor.json_files import as_written, parse_json
from elastic_ring.monitor.metrics import JOURNAL_NAME, METRICS_NAME, STATUS_NAME, ResumePoint, cut_at_its_end
from elastic_ring.runtime.identity import Identity
from elastic_ring.runtime.run_storage import growing
from elastic_ring.state.checkpoints.checkpoint import committed, wrong_with
from elastic_ring.state.checkpoints.manifest import (
    COMMIT,
    FOLDER,
    LINEAGES,
    REJECTED,
    Manifest,
    age_key,
    lineage_of_record,
    located,
    read_manifest,
)
from elastic_ring.state.storage.folder import Storage, open_or_refuse


@dataclass(frozen=True)
class Earlier:
    """From the records of earlier submissions: later manifests of the corpus, the number of steps from step 0 on, and
    the batches left out (None without records)."""

    corpus: tuple[CorpusVersion, ...] = ()
    num_steps: int = 0
    skips: tuple[BatchSkip, ...] | None = None


def earlier(storage: Storage, lineage: int, identity: str, damaged: dict[str, str]) -> Earlier:
    """Read the records of the last submission of `lineage`, which took over those before it.

    Empty where they are no longer in `storage` (an object store keeps only the last submission's) or belong to another
    `identity`. Damaged lines are left out, and named in `damaged`, by file. Raises StorageFailed.
    """
    attempts = [f"{name}/" for name in storage.folders() if name.startswith("attempt-")]
    for folder in ("", *reversed(attempts)):
        name = folder + JOURNAL_NAME
        records = list(_records(storage, name, damaged))
        lines = standing(records)
        begin = next((line for line in lines if line.get("note") == "begin"), None)
        if begin is None or begin.get("lineage", 0) != lineage or begin.get("identity", identity) != identity:
            continue
        if cut := cut_at_its_end(storage.at(name), len(records), _status(storage, folder + STATUS_NAME)):
            damaged[name] = f"{cut}: {FROM_OTHER_LINES}"
        lines_of_steps = (line for line in _records(storage, folder + METRICS_NAME, damaged) if "loss_hex" in line)
        num_steps = max((step + 1 for line in lines_of_steps if type(step := line.get("step")) is int), default=0)
        try:
            versions, skips = journalled(lines)
            return Earlier(versions, max(num_steps, begin.get("num_steps", 0)), skips)
        except (LookupError, TypeError, AttributeError) as error:
            damaged[name] = f"{storage.at(name)} holds something else ({type(error).__name__}: {error})"
    return Earlier()


FROM_OTHER_LINES = "which sequences the steps after the checkpoint used is known from the other lines only"


def _status(storage: Storage, name: str) -> Mapping[str, object]:
    """A run's status.json; empty where it is missing or damaged, as it counts for nothing then."""
    with suppress(RecordDamaged):
        return parse_json(storage.read_record(name), storage.at(name)) if storage.exists(name) else {}
    return {}


def _records(storage: Storage, name: str, damaged: dict[str, str]) -> Iterator[dict[str, Any]]:
    wrong = list[Flaw]()
    try:
        for line in Lines(io.BytesIO(growing(storage, name)), storage.at(name), wrong):
            yield line.record
    except RecordDamaged as error:
        damaged[name] = error.message
    if wrong:
        damaged[name] = f"line {wrong[0].line} of {storage.at(name)} {wrong[0].problem}: {FROM_OTHER_LINES}"


LENGTHS = ("total_steps", "warmup_steps")
MAX_FINDINGS, MAX_CHARACTERS = 3, 200
"""Of a report of damage, and of each finding in it."""


@dataclass(frozen=True)
class Resume:
    """Where a submission begins. `checkpoints`: those that may be used, by step; empty for step 0."""

    lineage: int = 0
    checkpoints: tuple[Checkpoint, ...] = ()
    resumed_from: tuple[ResumePoint, ...] = ()
    """The resumes so far, this one last."""
    corpus: tuple[CorpusVersion, ...] = ()
    """The later manifests of the corpus: those at that checkpoint, and those that earlier submissions took after it."""
    num_steps: int = 0
    """How many steps earlier submissions ran, where the corpus may grow: they use the same sequences again."""
    skips: tuple[BatchSkip, ...] = ()
    """The batches that are left out: by the settings, and by earlier submissions that went back."""
    excludes: bool = True
    """Whether the run's storage keeps two writers of one name apart, as the driver has tried."""
    places: Mapping[str, str] = field(default_factory=dict)
    """The paths of the data when the newest checkpoint was written."""
    sequences_per_pass: int | None = None
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Why checkpoints and records do not count, by name; by URI where they lie in another storage than the run's."""

    @property
    def step(self) -> int:
        """The step that runs first, if the newest verifies."""
        return self.checkpoints[-1].step if self.checkpoints else 0

    def journalled(self) -> dict[str, object]:
        """For the journal's first note, which the next submission reads."""
        corpus = [asdict(version) for version in self.corpus]
        skips = [asdict(skip) for skip in self.skips]
        return {"lineage": self.lineage, "corpus": corpus, "num_steps": self.num_steps, "skips": skips}


def scan_checkpoints(storage: Storage) -> tuple[dict[Checkpoint, Manifest], dict[str, str]]:
    """The checkpoints that count, by lineage and step, with their manifests; and the damage of others, by folder."""
    valid: dict[Checkpoint, Manifest] = {}
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
        valid[Checkpoint(manifest.step, folder, Mesh(manifest.num_parts, manifest.cp))] = manifest
    return valid, damaged


def lineage_of(folder: str) -> int:
    """-1 if the name of the folder is not a checkpoint's."""
    return age_key(located("", folder)[1])[0]


@dataclass
class _Stored:
    """The checkpoints of a storage whose manifests are right, by lineage and step; the checkpoints at which each
    lineage began; and the damage of other checkpoints and records, by name."""

    storage: Storage
    checkpoints: list[Checkpoint]
    damaged: dict[str, str]
    begun: dict[int, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, storage: Storage, identity: Identity) -> _Stored:
        manifests, damaged = scan_checkpoints(storage)
        strangers = [c.folder for c, manifest in manifests.items() if _other_settings(manifest, identity)]
        if len(strangers) == len(manifests):  # these are the run's, and its settings have changed: `_resume` says so
            strangers = []
        damaged |= {folder: f"{storage.at(folder)} is a checkpoint of other settings" for folder in strangers}
        stored = cls(storage, [c for c in manifests if c.folder not in strangers], damaged)
        for name, _ in storage.names(LINEAGES):
            lineage = lineage_of_record(name)
            if lineage < 0:  # it was set aside
                continue
            where = storage.at(name)
            try:
                begun = parse_json(storage.read_record(name), where)
                if begun.get("identity", identity.digest) != identity.digest:
                    raise RecordDamaged(f"{where} is another run's", path=name)
                with as_written(where):
                    stored.begun[lineage] = [_checkpoint_name(folder, where) for folder in begun["from"]]
            except RecordDamaged as error:
                damaged[name] = error.message
        return stored

    @property
    def newest(self) -> int:
        """The newest lineage, -1 for none."""
        names = [*self.damaged, *(checkpoint.folder for checkpoint in self.checkpoints)]
        return max([*self.begun, *map(lineage_of, names), *map(lineage_of_record, names)], default=-1)

    def of_lineage(self, lineage: int) -> list[Checkpoint]:
        return self.whole([c for c in self.checkpoints if lineage_of(c.folder) == lineage])

    def whole(self, candidates: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Drop the newest that lack a file or a part of one; wrong bytes show only when they are read."""
        left = list(candidates)
        while left and (wrong := wrong_with(self.storage, left[-1].folder, read_bytes=False)):
            self.damaged[left.pop().folder] = shortened(wrong)
        return left


def find_resume(run: RunConfig, identity: Identity, *, grows: bool = False) -> Resume:
    """The checkpoint at which a submission with these settings begins, by `run.resume`. `grows`: the corpus may grow
    while it trains. Without earlier submissions the settings say which batches are left out.

    Raises: ValueError for a step without a checkpoint, a path that is none, and a checkpoint of another run's settings
    (it names what differs) or of a newer format; StorageFailed.
    """
    writes = not Storage(run.storage_uri).is_local  # a folder is tried elsewhere
    storage = open_or_refuse(run.storage_uri, write=writes, timeout_s=run.timeouts.storage_s)
    goes_back = run.loss_spike == "act" and "back" in run.loss_spike_actions  # and so leaves batches out
    reads_earlier = grows or goes_back
    stored = _Stored.of(storage, identity)
    newest = stored.newest
    if run.resume == "never":
        return Resume(newest + 1, skips=skips_of(run), excludes=storage.excludes)
    if run.resume == "auto":
        usable, lineage, read_lineage = _newest_whole(run, stored), max(newest, 0), max(newest, 0)
    elif run.resume.isdigit():
        usable = stored.whole([c for c in stored.checkpoints if c.step == int(run.resume)])[-1:]
        if not usable:
            steps = ", ".join(str(checkpoint.step) for checkpoint in stored.checkpoints)
            raise ValueError(
                f"resume={run.resume!r}: no checkpoint of that step in {storage.uri}; "
                f"there are {steps or 'none'}{_and_damaged(stored.damaged)}"
            )
        lineage, read_lineage = newest + 1, lineage_of(usable[-1].folder)
    else:
        return replace(_resume_from(run, newest + 1, identity, reads_earlier), excludes=storage.excludes)
    before = earlier(storage, read_lineage, identity.digest, stored.damaged) if reads_earlier else Earlier()
    resume = _resume(run, storage, usable, lineage, identity, before)
    return replace(resume, damaged=stored.damaged, excludes=storage.excludes)


def skips_of(run: RunConfig) -> tuple[BatchSkip, ...]:
    """Raises ValueError for steps that do not rise."""
    pairs = [tuple(map(int, entry.split("+"))) for entry in run.skip_batches]
    if any(later[0] <= earlier[0] for earlier, later in pairwise(pairs)):
        raise ValueError(f"skip_batches={run.skip_batches}: each entry needs a later step than the one before")
    return tuple(BatchSkip(*pair) for pair in pairs)


def _newest_whole(run: RunConfig, stored: _Stored) -> list[Checkpoint]:
    """The checkpoints that a submission may use: of the newest lineage; where that has none, the one at which it began;
    where that is not known, or its own are damaged, of the lineages before. Empty for step 0.

    Raises ValueError where there were checkpoints and none is left, as a run must not begin at step 0 again without a
    word after a week of training; and where the one at which the lineage began is gone.
    """
    newest = stored.newest
    usable, begun_from = stored.of_lineage(newest), stored.begun.get(newest, ())
    ending = f"/lineage-{newest:03d}/"
    aside = [name for name, _ in stored.storage.names(FOLDER) if name.endswith(REJECTED) and ending in name]
    lost = [*aside, *(name for name in stored.damaged if lineage_of(name) == newest >= 0)]  # do not count any more
    if usable:  # where no byte of them is right, the one at which they began is left
        return [*(c for c in stored.checkpoints if c.folder in begun_from and c.step < usable[0].step), *usable]
    if newest in stored.begun and not begun_from and not lost:
        return []
    usable = _beginning_of(run, stored, begun_from)
    if lost or newest not in stored.begun:
        for lineage in sorted({lineage_of(c.folder) for c in stored.checkpoints} - {newest}, reverse=True):
            usable = usable or stored.of_lineage(lineage)
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


def _and_damaged(damaged: Mapping[str, str]) -> str:
    return "; " + shortened(damaged.values()) if damaged else ""


def shortened(lines: Iterable[str]) -> str:
    """One line: the first of the lines, and how many more there are."""
    return few((cut(line, MAX_CHARACTERS) for line in lines), MAX_FINDINGS, "; ")


def _beginning_of(run: RunConfig, stored: _Stored, begun_from: Sequence[str]) -> list[Checkpoint]:
    """The checkpoint at which a lineage began, in this storage or in one beside it; empty where it is gone.

    Raises ValueError for another storage: a record may be a stranger's, and must not choose what this user opens.
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
            usable += [replace(c, folder=path) for c in scan_checkpoints(storage)[0] if c.folder == folder]
        else:
            usable += stored.whole([c for c in stored.checkpoints if c.folder == path])
    return usable


def _checkpoint_name(name: object, where: str) -> str:
    """`name` if it is a checkpoint's, in this storage or, with a whole path, in another. Raises RecordDamaged."""
    uri, folder = located("", name) if isinstance(name, str) else ("", "")
    try:
        name_below(folder, where)
        is_name = lineage_of(folder) >= 0 and uri.isprintable() and uri.rpartition("/")[2] not in (".", "..")
    except ValueError:
        is_name = False
    if not is_name:
        raise RecordDamaged(f"{where} names {cut(ascii(name), MAX_CHARACTERS)}, which is no checkpoint", path=where)
    return str(name)


def _resume_from(run: RunConfig, lineage: int, identity: Identity, reads_earlier: bool) -> Resume:
    """From a path: of a checkpoint, or of a run, whose newest is used."""
    uri, folder = located("", run.resume.rstrip("/"))
    where = uri or run.resume.rstrip("/")
    storage = open_or_refuse(where, write=False, timeout_s=run.timeouts.storage_s, setting="resume")
    stored = _Stored.of(storage, identity)
    usable = stored.whole([c for c in stored.checkpoints if c.folder == folder or not uri])[-1:]
    if not usable:
        raise ValueError(
            f"resume={run.resume!r}: there is no checkpoint; give auto, never, a step, or the path of a "
            f"run or of one of its checkpoints (elastic-ring checkpoints list PATH)"
            f"{_and_damaged(stored.damaged)}"
        )
    source = lineage_of(usable[-1].folder)
    before = earlier(storage, source, identity.digest, stored.damaged) if reads_earlier else Earlier()
    usable = [replace(checkpoint, folder=uri_of(storage, checkpoint.folder)) for checkpoint in usable]
    resume = _resume(run, storage, usable, lineage, identity, before)
    return replace(resume, damaged={uri_of(storage, name): reason for name, reason in stored.damaged.items()})


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
    if differences := _other_settings(manifest, identity):
        raise ValueError(
            f"{uri_of(storage, folder)} is a checkpoint of other settings ({few(differences, MAX_FINDINGS, '; ')}): "
            "submit the same, choose "
            f"another run name, or give resume='never' in a new storage_path{_longer_run(manifest, differences)}"
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


def _longer_run(manifest: Manifest, differences: Sequence[str]) -> str:
    """The flags for a run with more steps, whose schedule follows the steps by default; empty if more differs."""
    there = {name: str(manifest.run.get("settings", {}).get(f"optim.{name}")) for name in LENGTHS}
    if not {text.partition(":")[0] for text in differences} <= {f"optim.{name}" for name in LENGTHS}:
        return ""
    flags = " ".join(f"--optim.{name.replace('_', '-')} {value}" for name, value in there.items())
    return f"; for more steps at the rate with which its schedule ended give {flags}"


def _other_settings(manifest: Manifest, identity: Identity) -> list[str]:
    return [] if manifest.identity == identity.digest else identity.differences(manifest.run.get("settings", {}))


def uri_of(storage: Storage, name: str) -> str:
    return f"{storage.uri.rstrip('/')}/{name}"
