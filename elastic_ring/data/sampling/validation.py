"""What a validation computes: sets of sequences with names and weights, each held out or a corpus of its own.

One validation is one list of sequences, set after set, which the rings share; its results are added up in that order,
whatever the mesh. No model and no exchange in here.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

from pydantic import Field

from elastic_ring.config import StepConfig
from elastic_ring.data.packing import Sample
from elastic_ring.data.source import Source, SourceConfig, fingerprinted
from elastic_ring.validation import Must, PositiveInt, settings

HELD_OUT = "the sequences held out of the training data"
LOSS, PERPLEXITY = "loss", "perplexity"
MOST_NATS = 700.0
"""A float has no perplexity of a larger loss."""


@settings
class ValidationSet:
    """One set of sequences that are computed at each validation and never trained on."""

    data: Any = None
    """A source like the trainer's; None: the sequences held out of the training data."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False), Must("a number above 0")] = 1.0
    """In the mean of all sets, which is `val_loss`."""
    num_sequences: PositiveInt | None = None
    """Take so many, evenly spread over the set and the same each time; all if left out."""


def holds_out(sets: Mapping[str, ValidationSet]) -> bool:
    """Whether sequences are held out of the training data: without sets, or for one that has no data of its own."""
    return not sets or any(part.data is None for part in sets.values())


def measured(sets: Collection[str], metrics: Collection[str]) -> list[str]:
    """The names of a validation's results: of all sets together, and of each. Raises ValueError for a name that two
    have."""
    kinds = [LOSS, PERPLEXITY, *metrics]
    names = [f"val_{kind}" for kind in kinds] + [f"val_{name}_{kind}" for name in sets for kind in kinds]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"metrics and validation: two have the name {twice}: rename the metric or the set")
    return names


def check_length(data: SourceConfig, step: StepConfig, named: str) -> None:
    """Raises ValueError for data whose sequences are not as long as the steps'."""
    if data.context_tokens != step.context_tokens:
        raise ValueError(
            f"{named}.context_tokens={data.context_tokens} differs from step.context_tokens={step.context_tokens}: "
            "set both to the same"
        )


def check_sets(sets: Mapping[str, ValidationSet], step: StepConfig) -> None:
    """Raises ValueError for sets without a result."""
    for name, part in sets.items():
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or not isinstance(part, ValidationSet):
            raise ValueError(
                f"validation={{{name!r}: ...}}: give ValidationSet(...) by names of small letters, digits and _"
            )
        if part.data is not None:
            check_length(part.data, step, f"validation {name}: data")
    if sets and not step.validates:
        raise ValueError(
            f"validation has {', '.join(sets)}, and val_every_steps=0 never validates: set it, or val_every_tokens"
        )


@dataclass(frozen=True)
class _Part:
    """One set, opened: sequences `ids` of `source`."""

    name: str
    weight: float
    source: Source
    ids: Sequence[int]


class ValidationSource:
    """All sequences of a validation, set after set, as one source. Raises ValueError for a set that is too short."""

    def __init__(self, sets: Mapping[str, ValidationSet], held: Source, own: Mapping[str, Source]) -> None:
        """`held`: the sequences held out; `own`: of the sets that have data of their own the opened sources."""
        self._parts: list[_Part] = []
        for name, part in (sets or {"": ValidationSet()}).items():
            source = own.get(name, held)
            total = source.num_sequences
            num = part.num_sequences or total
            if num > total:
                where = HELD_OUT if part.data is None else str(part.data)
                raise ValueError(
                    f"validation {name}: num_sequences={num} of {total} in {where}: take fewer, or leave it out for all"
                )
            self._parts.append(_Part(name, part.weight, source, [index * total // num for index in range(num)]))
        self._places = [(part, sequence) for part in self._parts for sequence in part.ids]

    @property
    def num_sequences(self) -> int:
        return len(self._places)

    @property
    def context_tokens(self) -> int:
        return self._parts[0].source.context_tokens

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256("".join(part.source.fingerprint for part in self._parts).encode()).hexdigest()

    def read(self, sample_id: int) -> Sample:
        part, sequence = self._places[sample_id]
        return part.source.read(sequence)

    def means(self, kinds: Sequence[str], sums: Sequence[Sequence[tuple[float, float]]]) -> dict[str, float]:
        """The results, by the names of `measured`. `sums`: of each sequence, for each of `kinds`, (sum, number). They
        are added up without rounding in between, so that nothing depends on who computed which."""
        rows = iter(sums)
        by_set: dict[str, dict[str, float]] = {}
        for part in self._parts:
            of_part, means = list(islice(rows, len(part.ids))), dict[str, float]()
            for column, kind in enumerate(kinds):
                total, number = (math.fsum(row[column][index] for row in of_part) for index in (0, 1))
                means[kind] = total / number if number else math.nan
            by_set[part.name] = means
        weights = [part.weight for part in self._parts]
        together: dict[str, float] = {}
        for kind in kinds:
            values = [means[kind] for means in by_set.values()]
            weighted = math.fsum(weight * value for weight, value in zip(weights, values, strict=True))
            together[kind] = values[0] if len(values) == 1 else weighted / math.fsum(weights)  # one is not even rounded
        results = _with_perplexity("val_", together)
        for name, means in by_set.items():
            results |= _with_perplexity(f"val_{name}_", means) if name else {}
        return results


def open_sets(sets: Mapping[str, ValidationSet]) -> dict[str, tuple[Source, str]]:
    """The source and fingerprint of each set with data of its own. Raises as `fingerprinted`, with the set's name."""
    opened = {}
    for name, part in sets.items():
        if part.data is not None:
            with of_set(name):
                opened[name] = fingerprinted(part.data)
    return opened


@contextmanager
def of_set(name: str) -> Iterator[None]:
    """A ValueError in the context names the set."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"validation {name}: {error}") from error


def with_sets(fingerprint: str, opened: Mapping[str, tuple[Source, str]]) -> str:
    """The training data's fingerprint and those of the sets, as one."""
    if not opened:
        return fingerprint
    return hashlib.sha256(":".join([fingerprint, *(digest for _, digest in opened.values())]).encode()).hexdigest()


def _with_perplexity(prefix: str, means: Mapping[str, float]) -> dict[str, float]:
    """The means by their full names, with the perplexity after the loss."""
    loss = means[LOSS]
    perplexity = math.exp(loss) if not loss > MOST_NATS else math.inf
    return {f"{prefix}{kind}": mean for kind, mean in {LOSS: loss, PERPLEXITY: perplexity, **means}.items()}
