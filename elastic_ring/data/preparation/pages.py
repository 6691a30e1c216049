"""What the pages of a Parquet file expand to, by their headers: pyarrow expands them whole. Nothing is expanded here.

Headers and footer are structs in Thrift's compact protocol. pyarrow's view of a footer ends the process where its
statistics are damaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

DAMAGED = (LookupError, RecursionError, StopIteration, TypeError, UnicodeDecodeError)
FOOTER_END_BYTES, MAX_FIELD = 8, 99
BOOL, INT64, DOUBLE, BINARY, STRUCT = (1, 2), 6, 7, 8, 12
LISTS, INTEGERS = (9, 10), (4, 5, INT64)


def row_groups(file: Any) -> list[list[tuple[str, int, int]]]:
    """(path, start, bytes) of the columns of each row group. Raises ArrowInvalid."""
    end = file.size() - FOOTER_END_BYTES
    num_bytes = min(int.from_bytes(file.read_at(4, max(end, 0)), "little"), end)
    try:
        footer, _ = _struct(file.read_at(num_bytes, end - num_bytes), 0)
        return [[_column(chunk[3], end) for chunk in group[1]] for group in footer[4]]
    except DAMAGED as error:
        raise pa.ArrowInvalid("the footer is damaged") from error


def _column(about: dict[int, Any], most_bytes: int) -> tuple[str, int, int]:
    first, dictionary = about[9], about.get(11, 0)
    start = dictionary if 0 < dictionary < first else first
    return ".".join(part.decode() for part in about[3]), max(start, 0), max(min(about[7], most_bytes), 0)


def row_bytes(file: Any, columns: Sequence[tuple[str, int, int]], names: Sequence[str], most_bytes: int) -> int:
    """The most bytes that a row of a row group may have in the columns of these names: those of their largest pages.
    Raises ArrowInvalid for a page of more than `most_bytes`."""
    total = 1
    for path, start, num_bytes in columns:
        if any(f"{path}.".startswith(f"{name}.") for name in names):
            largest = _largest_page(file.read_at(num_bytes, start))
            if largest > most_bytes:
                raise pa.ArrowInvalid(f"a page of {path!r} expands to {largest:,} bytes: there may be {most_bytes:,}")
            total += largest
    return total


def _largest_page(chunk: bytes) -> int:
    at = largest = 0
    try:
        while at < len(chunk):
            header, at = _struct(chunk, at)
            largest, at = max(largest, header[2]), at + max(header[3], 0)
    except DAMAGED as error:
        raise pa.ArrowInvalid(f"the page header before byte {at} of a column is damaged") from error
    return largest


def _struct(data: bytes, at: int) -> tuple[dict[int, Any], int]:
    """Values by field, and where they end. Fields rise by at most 15: else pyarrow may read others."""
    fields, field = dict[int, Any](), 0
    while head := data[at]:
        field, kind, at = field + (head >> 4), head & 15, at + 1
        if not head >> 4 or field > MAX_FIELD:
            raise LookupError(f"field {field}")
        fields[field], at = (None, at) if kind in BOOL else _value(data, at, kind)
    return fields, at + 1


def _value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind == STRUCT:
        return _struct(data, at)
    if kind in LISTS:
        num, kind, at = data[at] >> 4, data[at] & 15, at + 1
        num, at = _number(data, at) if num == 15 else (num, at)
        values = []
        for _ in range(min(num, len(data))):
            value, at = _value(data, at, kind)
            values.append(value)
        return values, at
    if kind == BINARY:
        num, at = _number(data, at)
        return data[at : at + num], at + num
    if kind in INTEGERS:
        number, at = _number(data, at, 64 if kind == INT64 else 32)
        return number >> 1 ^ -(number & 1), at
    return None, at + {**dict.fromkeys((*BOOL, 3), 1), DOUBLE: 8}[kind]


def _number(data: bytes, at: int, num_bits: int = 32) -> tuple[int, int]:
    end = next(end for end in range(at, at + 10) if data[end] < 128) + 1
    return sum((byte & 127) << 7 * place for place, byte in enumerate(data[at:end])) % (1 << num_bits), end
