"""How lists and texts are cut for one line."""

from __future__ import annotations

from elastic_ring.files import cut, few


def test_the_first_are_named_and_the_others_counted() -> None:
    assert few([], 2) == ""
    assert few(["a", 2], 2) == "a, 2"
    assert few("abcd", 2, "; ") == "a; b and 2 more"
    assert (cut("abc", 3), cut("abcd", 3)) == ("abc", "abc...")
