"""What was done with many files, in a few lines: groups of them with their number, size and first names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

NAMES = 5
"""How many names of each group are printed."""


@dataclass
class Group:
    """Files of one kind, or left out for one reason."""

    what: str
    num_files: int = 0
    num_bytes: int = 0
    names: list[str] = field(default_factory=list)

    def add(self, name: str, num_bytes: int) -> None:
        self.num_files += 1
        self.num_bytes += num_bytes
        if len(self.names) < NAMES:
            self.names.append(name)


def grouped(entries: Iterable[tuple[str, str, int]]) -> list[Group]:
    found: dict[str, Group] = {}
    for what, name, num_bytes in entries:
        found.setdefault(what, Group(what)).add(name, num_bytes)
    return sorted(found.values(), key=lambda group: -group.num_bytes)


def lines(groups: Iterable[Group]) -> list[str]:
    """A line a group: how many files, how much, the first names."""
    return [
        f"{group.what}: {count(group.num_files)}, {size(group.num_bytes)} "
        f"({', '.join(group.names)}{', ...' if group.num_files > len(group.names) else ''})"
        for group in groups
    ]


def summary(what: str, groups: Sequence[Group]) -> list[str]:
    """How many files were used, or left out, and a line for each kind of them; nothing where there are none."""
    if not groups:
        return []
    num_files, num_bytes = sum(group.num_files for group in groups), sum(group.num_bytes for group in groups)
    return [f"{what}: {count(num_files)}, {size(num_bytes)}", *(f"  {line}" for line in lines(groups))]


def count(num_files: int) -> str:
    return f"{num_files:,} {'file' if num_files == 1 else 'files'}"


def size(num_bytes: int) -> str:
    amount, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
