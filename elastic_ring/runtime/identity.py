"""A run's identity: digests of the settings and contents that a submission must share with the run that it continues.

Places (paths, mounts, buckets, working directories) are recorded beside it: a changed place is reported and refuses
nothing. Nothing starts here, and no place enters `Identity.entries`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

from elastic_ring.data.filesystem import at_submission
from elastic_ring.data.packing import Files
from elastic_ring.data.source import SourceConfig, fingerprinted
from elastic_ring.files import cut, few, shown_url
from elastic_ring.model.config import built_in
from elastic_ring.train.task import TrainingTask

log = logging.getLogger(__name__)

VERSION, CONTENTS = "identity", "contents 2"
"""The entry that says how an identity is written."""
NUM_SHOWN, MAX_SHOWN_CHARS = 3, 60
MAX_FILES, DIGITS = 1000, 16


@dataclass(frozen=True)
class Identity:
    """`entries` are compared; `places` has the paths of its contents, by the same names."""

    entries: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """The digest that a checkpoint and a submission must share."""
        return hashlib.sha256(json.dumps(dict(sorted(self.entries.items()))).encode()).hexdigest()

    def differences(self, recorded: Mapping[str, str]) -> list[str]:
        """The entries in which a recorded identity differs, as text."""
        if recorded and recorded.get(VERSION) != CONTENTS:
            return [
                f"it has an identity of another version ({recorded.get(VERSION)}), and this one writes {CONTENTS}: go "
                "on with that version, or begin another run with its weights, --from"
            ]
        here = self.entries
        return [
            f"{name}: {' there, '.join(contrast(str(recorded.get(name)), str(here.get(name))))} here"
            for name in sorted({*recorded, *here})
            if recorded.get(name) != here.get(name)
        ]

    def log_moved(self, run: str, recorded: Mapping[str, str]) -> None:
        """Logs one line where contents have another place than on record."""
        moved = [
            f"{name} was at {_short(recorded[name])} and is at {_short(place)} now"
            for name, place in sorted(self.places.items())
            if recorded.get(name, place) != place
        ]
        if moved:
            log.info("run %s goes on with the same contents elsewhere: %s", run, "; ".join(moved))


def contents_of(data: SourceConfig) -> tuple[str, Files]:
    """The digest of a source's contents; and its files with the beginnings of their digests, if at most MAX_FILES.

    Logs which of its files are used. Raises: ValueError for data that cannot be read; StorageFailed.
    """
    source, fingerprint = at_submission(lambda: fingerprinted(data))
    for note in getattr(source, "notes", ()):
        log.info("%s", note)
    files = getattr(source, "files", ())
    short_files = tuple((name, digest[:DIGITS]) for name, digest in files) if len(files) <= MAX_FILES else ()
    return f"{type(data).__qualname__} {fingerprint}", short_files


class ContentDigests:
    """`contents_of` each source, read once."""

    def __init__(self) -> None:
        self._known: list[tuple[SourceConfig, str, Files]] = []

    def of(self, data: SourceConfig) -> tuple[str, Files]:
        for source, digest, files in self._known:
            if source is data:
                return digest, files
        digest, files = contents_of(data)
        self._known.append((data, digest, files))
        return digest, files

    def take_recorded(self, data: SourceConfig, digest: str) -> None:
        """The data of a finished run may be gone: its record says what they held."""
        if not any(source is data for source, _, _ in self._known):
            self._known.append((data, digest, ()))


def changed_files(recorded: Sequence[Sequence[str]], submitted: Sequence[Sequence[str]]) -> str:
    """The files that differ from those on record, as text; empty where either list is."""
    if not recorded or not submitted:
        return ""
    before, now = (
        {name for name, _ in Counter(map(tuple, files)) - Counter(map(tuple, base))}
        for files, base in ((recorded, submitted), (submitted, recorded))
    )
    kinds = {"changed": before & now, "gone": before - now, "new": now - before}
    texts = [f"{kind} {few(sorted(names), NUM_SHOWN)}" for kind, names in kinds.items() if names]
    return f"files of the data: {'; '.join(texts) or 'the same, in another order or cut otherwise'}"


def identity_of(
    task: TrainingTask, settings: Mapping[str, object], parts: Mapping[str, str], contents: str
) -> Identity:
    """The identity of a run with these `settings` of its step, `parts` that are code, and data with the digest
    `contents`."""
    entries = {f"step.{name}": value for name, value in settings.items()}
    first_plan = {**vars(task.optim), "total_steps": task.optim.plans[0][1]}  # later plans change no step before them
    named = {name: value for name, value in first_plan.items() if name != "replanned" and value != "adamw"}
    entries |= {f"optim.{name}": value for name, value in named.items()}  # AdamW had no name before there was a choice
    entries |= {"step.kv_wire": task.step.kv_wire, "step.linears": task.step.linears}
    if (shape := built_in(task.model)) is not None:
        entries["slices of the model"] = shape.sliced
    pattern = "" if task.pattern is None else task.pattern.identity
    entries |= {**parts, "data": contents, "pattern": pattern, VERSION: CONTENTS}
    places = {"data": place_of(task.data), "model": place_of(task.model)}
    return Identity(
        {name: str(value) for name, value in entries.items()}, {name: place for name, place in places.items() if place}
    )


def place_of(part: Any) -> str:
    """The path or URL of a source or model; empty if it has none."""
    place = next((value for name in ("uri", "paths", "folder") if (value := getattr(part, name, None))), "")
    return ", ".join(map(shown_url, map(str, place))) if isinstance(place, tuple) else shown_url(str(place))


def code_parts(task: TrainingTask, *, decides: bool = False) -> dict[str, object]:
    """The parts of a task that are code; with `decides` without those that only watch the training or say how it is
    done."""
    names = ("model", "loss", "optimizer", "initial", *(() if decides else ("units",)))
    parts: dict[str, object] = {name: getattr(task, name) for name in names}
    if not decides:
        parts |= {f"metric {name}": metric for name, metric in task.metrics.items()}
    if task.lr_schedule is not None:
        parts["lr_schedule"] = task.lr_schedule
    return parts


def describe(part: Any) -> str:
    """A description of a user's callable or object that is equal in every process: qualified name and arguments.

    An object without its own `repr` is described by its class.
    """
    if isinstance(part, partial):
        arguments = [describe(value) for value in part.args]
        named = [f"{name}={describe(value)}" for name, value in part.keywords.items()]
        return f"{describe(part.func)}({', '.join(arguments + named)})"
    if hasattr(part, "__qualname__"):
        return f"{part.__module__}.{part.__qualname__}"
    if repr(part) == object.__repr__(part):
        return f"{type(part).__module__}.{type(part).__qualname__}"
    return repr(part)


def contrast(recorded: str, submitted: str) -> tuple[str, str]:
    """Both texts, cut; long ones begin with the argument in which they differ."""
    num_alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(recorded, submitted, strict=False)))
    at = recorded.rfind(", ", 0, num_alike) + 2
    if at > 2 and max(len(recorded), len(submitted)) > MAX_SHOWN_CHARS:
        recorded, submitted = f"... {recorded[at:]}", f"... {submitted[at:]}"
    return _short(recorded), _short(submitted)


def _short(text: str) -> str:
    return cut(text, MAX_SHOWN_CHARS)
