"""What a Parquet page expands to, by its header: pyarrow expands it whole. Nothing is expanded in here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

EXPANDED, STORED = 2, 3  # bytes of a page: fields of its header, a struct in Thrift's compact protocol
INT32, INTEGERS, BINARY, STRUCT = 5, (4, 5, 6, 8), 8, 12  # types there; a binary value begins with its length
MAX_FIELD = 99
SIZES = {1: 0, 2: 0, 3: 1, 7: 8}  # bytes of other types; page headers have no lists


def row_bytes(file: Any, row_group: Any, names: Sequence[str], most_bytes: int) -> int:
    """The most bytes that a row of these columns may have: those of their largest pages. Raises ArrowInvalid for a page
    of more than `most_bytes`."""
    total = 1
    for column in map(row_group.column, range(row_group.num_columns)):
        if any(f"{column.path_in_schema}.".startswith(f"{name}.") for name in names):
            start = min(column.data_page_offset, column.dictionary_page_offset or column.data_page_offset)
            largest = _largest_page(file.read_at(column.total_compressed_size, start))
            if largest > most_bytes:
                told = f"a page of {column.path_in_schema!r} expands to {largest:,} bytes"
                raise pa.ArrowInvalid(f"{told}: there may be {most_bytes:,}")
            total += largest
    return total


def _largest_page(chunk: bytes) -> int:
    at = largest = 0
    try:
        while at < len(chunk):
            header, at = _int32s(chunk, at)
            largest, at = max(largest, header[EXPANDED]), at + max(header[STORED], 0)
    except (LookupError, RecursionError, StopIteration) as error:
        raise pa.ArrowInvalid(f"the page header before byte {at} of a column is damaged") from error
    return largest


def _int32s(data: bytes, at: int) -> tuple[dict[int, int], int]:
    """A struct's 32-bit numbers by field, and where it ends. Fields rise by 15 or less: else pyarrow's may differ."""
    numbers, field = dict[int, int](), 0
    while head := data[at]:
        field, kind, at = field + (head >> 4), head & 15, at + 1
        if not head >> 4 or field > MAX_FIELD:
            raise LookupError(f"field {field}")
        if kind in INTEGERS:
            value, at = _number(data, at)
            at += value if kind == BINARY else 0
            if kind == INT32:
                numbers[field] = value >> 1 ^ -(value & 1)
        else:
            at = _int32s(data, at)[1] if kind == STRUCT else at + SIZES[kind]
    return numbers, at + 1


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Its last 32 bits, and where it ends."""
    end = next(end for end in range(at, at + 10) if data[end] < 128) + 1
    return sum((byte & 127) << 7 * place for place, byte in enumerate(data[at:end])) & 0xFFFFFFFF, end
