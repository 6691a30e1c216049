"""A run's identity: what a submission must share with the run that it continues.

It contains digests of the contents that a run trains on, and no places: paths, mounts, buckets, working directories.
The places are recorded beside it: a changed place is reported, and refuses nothing. Nothing starts here, and no place
enters `Identity.what`.
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
from elastic_ring.files import shown_url
from elastic_ring.model.config import built_in
from elastic_ring.train.task import TrainingTask
from elastic_ring.wording import cut, few

log = logging.getLogger(__name__)

VERSION, CONTENTS = "identity", "contents 2"
"""The entry that says how an identity is written."""
NUM_TOLD, SHORT = 3, 60
MAX_FILES, DIGITS = 1000, 16


@dataclass(frozen=True)
class Identity:
    """`what` is compared. `places` says where its contents are, by the same names."""

    what: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """What a checkpoint and a submission must share."""
        return hashlib.sha256(json.dumps(dict(sorted(self.what.items()))).encode()).hexdigest()

    def differences(self, there: Mapping[str, Any]) -> list[str]:
        """In which entries an identity on record is another, as text."""
        if there and there.get(VERSION) != CONTENTS:
            return [
                f"it has an identity of another version ({there.get(VERSION)}), and this one writes {CONTENTS}: go on "
                "with that version, or begin another run with its weights, --from"
            ]
        here = self.what
        return [
            f"{name}: {' there, '.join(told_apart(str(there.get(name)), str(here.get(name))))} here"
            for name in sorted({*there, *here})
            if there.get(name) != here.get(name)
        ]

    def tell_moved(self, run: str, there: Mapping[str, Any]) -> None:
        """One line where contents are at another place than the record says."""
        moved = [
            f"{name} was at {short(there[name])} and is at {short(place)} now"
            for name, place in sorted(self.places.items())
            if there.get(name, place) != place
        ]
        if moved:
            log.info("run %s goes on with the same contents elsewhere: %s", run, "; ".join(moved))


def contents_of(data: SourceConfig) -> tuple[str, Files]:
    """What a source holds, and its files, if it has some and not very many. Raises ValueError where it cannot be read,
    StorageFailed where its storage stays away.

    The first decides; the files say which of them changed, with the beginnings of their digests. Logs what of the files
    is used.
    """
    source, fingerprint = at_submission(lambda: fingerprinted(data))
    for note in getattr(source, "notes", ()):
        log.info("%s", note)
    whole, files = f"{type(data).__qualname__} {fingerprint}", getattr(source, "files", ())
    return whole, tuple((name, digest[:DIGITS]) for name, digest in files) if len(files) <= MAX_FILES else ()


def changed_files(there: Sequence[Sequence[str]], here: Sequence[Sequence[str]]) -> str:
    """Which files are not as on record, as text; empty where nobody knows."""
    if not there or not here:
        return ""
    gone, new = (Counter(map(tuple, one)) - Counter(map(tuple, other)) for one, other in ((there, here), (here, there)))
    before, now = ({name for name, _ in found} for found in (gone, new))
    kinds = {"changed": before & now, "gone": before - now, "new": now - before}
    told = [f"{kind} {few(sorted(names), NUM_TOLD)}" for kind, names in kinds.items() if names]
    return f"files of the data: {'; '.join(told) or 'the same, in another order or cut otherwise'}"


def identity_of(task: TrainingTask, settings: Mapping[str, Any], parts: Mapping[str, str], contents: str) -> Identity:
    """The identity of a run with these `settings` of its step, its `parts` that are code, and data of these
    `contents`."""
    found = {f"step.{name}": value for name, value in settings.items()}
    begun = {**vars(task.optim), "total_steps": task.optim.plans[0][1]}  # later plans change no step before them
    found |= {f"optim.{name}": value for name, value in begun.items() if name != "replanned"}
    found |= {"step.kv_wire": task.step.kv_wire, "step.linears": task.step.linears}
    if (shape := built_in(task.model)) is not None:
        found["slices of the model"] = shape.sliced
    pattern = "" if task.pattern is None else task.pattern.identity
    found |= {**parts, "data": contents, "pattern": pattern, VERSION: CONTENTS}
    what = {name: str(value) for name, value in found.items()}
    places = {"data": place_of(task.data), "model": place_of(task.model)}
    known = {name: place for name, place in places.items() if place}
    return Identity(what, known)


def place_of(part: Any) -> str:
    """Where a source or a model lies, if it says so."""
    given = next((found for name in ("uri", "paths", "folder") if (found := getattr(part, name, None))), "")
    return ", ".join(map(shown_url, map(str, given))) if isinstance(given, tuple) else shown_url(str(given))


def described(part: Any) -> str:
    """A stable description of a user's callable or object: qualified name and arguments.

    Equal in every process: an object without its own `repr` is described by its class, not by its address.
    """
    if isinstance(part, partial):
        arguments = [described(value) for value in part.args]
        named = [f"{name}={described(value)}" for name, value in part.keywords.items()]
        return f"{described(part.func)}({', '.join(arguments + named)})"
    if hasattr(part, "__qualname__"):
        return f"{part.__module__}.{part.__qualname__}"
    if repr(part) == object.__repr__(part):
        return f"{type(part).__module__}.{type(part).__qualname__}"
    return repr(part)


def told_apart(there: str, here: str) -> tuple[str, str]:
    """Both, cut; long ones begin with the argument in which they differ."""
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(there, here, strict=False)))
    at = there.rfind(", ", 0, alike) + 2
    if at > 2 and max(len(there), len(here)) > SHORT:
        there, here = f"... {there[at:]}", f"... {here[at:]}"
    return short(there), short(here)


def short(value: Any) -> str:
    return cut(str(value), SHORT)
