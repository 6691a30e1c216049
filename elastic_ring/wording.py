"""Lists and texts cut to a length that one line can hold, in every room."""

from __future__ import annotations

from collections.abc import Iterable


def few(parts: Iterable[object], most: int, between: str = ", ") -> str:
    """The first `most` of the parts, and how many more there are."""
    shown = list(map(str, parts))
    return between.join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")


def cut(text: str, most: int) -> str:
    """At most so many characters of a text, and a mark where some are left out."""
    return text if len(text) <= most else f"{text[:most]}..."
