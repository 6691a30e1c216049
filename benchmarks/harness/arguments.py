"""Pieces of the benches' command lines. Imports nothing that is slow: `--help` answers at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

IN_A_ROW = """passes between two readings of the clock: 1 makes GPUs wait for the host, more let it run ahead as in a
training step; waits for messages are always measured in single passes (1)"""


def bench_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser that prints the module's docstring as it is written."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def list_of(kind: Callable[[str], T], separator: str = ",") -> Callable[[str], list[T]]:
    """Parses `a,b,c`."""

    def parse(text: str) -> list[T]:
        return [kind(part) for part in text.split(separator)]

    parse.__name__ = f"list of {getattr(kind, '__name__', 'values')}"
    return parse


def num_tokens(text: str) -> int:
    """Parses 4096, 128K or 10M."""
    units = {"K": 2**10, "M": 2**20}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def num_heads(text: str) -> tuple[int, int]:
    """Parses QUERY:KV heads; one number means as many K/V heads."""
    query, _, keys = text.partition(":")
    return int(query), int(keys or query)


def at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return int(text)
