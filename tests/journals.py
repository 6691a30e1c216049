"""Journals as bytes: written, and read with and without damage."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from elastic_ring.monitor.journal import Flaw, Lines, Link, chained


def journal_bytes(records: Iterable[Mapping[str, Any]]) -> bytes:
    """A journal of these records."""
    lines, link = [], Link()
    for record in records:
        line, link = chained(record, link)
        lines.append(line)
    return b"".join(lines)


def parse(data: bytes, name: str) -> Iterator[dict[str, Any]]:
    """The records in a journal's bytes; as `read`, whose errors say `name` instead of a path."""
    for line in Lines(io.BytesIO(data), name):
        yield line.record


def salvage(data: bytes) -> tuple[list[dict[str, Any]], list[Flaw]]:
    """The intact records, and the lines that are damaged or before which others are missing.

    An incomplete last line is neither. Raises OtherFormat.
    """
    flaws: list[Flaw] = []
    return [line.record for line in Lines(io.BytesIO(data), "the journal", flaws)], flaws
