"""The parser of attention patterns: a short form for command lines, or JSON files. Text in, `LayerPatterns` out.

    window:512                               all layers
    sinks:64+window:512                      union of both
    longnet:512/1,2048/4,8192/16,unit=64     segment/rate pairs, heads shifted as in the paper
    topk:8+window:512                        the own and 7 past blocks chosen by content, and a window
    window:512;dense@3                       layer 3 dense, the others a window; @0,2-5 names several

A file is `{"block": 128, "groups": [{"layers": [3], "rule": "dense"}, {"heads": [{"count": 3, "rule":
"window:512"}, {"count": 1, "rule": "dense"}]}]}`. `block` (tokens) is optional; one group may omit `layers` and
applies to the rest. The keys `about` and `measured` are ignored. The rules are defined in `rules`, `families`
and `content` (`topk`). Only `read_pattern` opens files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, reduce
from itertools import product
from operator import or_
from pathlib import Path
from typing import Any

from elastic_ring.attention.patterns.content import TopK
from elastic_ring.attention.patterns.families import BigBird, Dilated, Hierarchical, Profile
from elastic_ring.attention.patterns.layers import LayerGroup, LayerPatterns
from elastic_ring.attention.patterns.rules import Dense, Rule, Sinks, Strided, Window
from elastic_ring.attention.patterns.sparse import DEFAULT_BLOCK_TOKENS
from elastic_ring.files import plain_json

MAX_DIGITS, MAX_LAYER = 9, 10_000

_UNIT = {"unit": 128}
# Name -> its numbers in order with defaults (None: required), and the constructor.
_FAMILIES: dict[str, tuple[dict[str, int | None], Callable[..., Rule]]] = {
    "dense": ({}, Dense),
    "window": ({"tokens": None, "ahead": 0}, Window),
    "sinks": ({"tokens": None}, Sinks),
    "strided": ({"every": None, "local": 1, **_UNIT}, Strided),
    "bigbird": ({"window": 3, "globals": 1, "randoms": 3, "seed": 0, **_UNIT}, BigBird),
    "random": ({"blocks": None, "seed": 0, **_UNIT}, partial(BigBird, 1, 0)),
    "hierarchical": ({"base": 4, **_UNIT}, Hierarchical),
    "topk": ({"blocks": None, "causal": 1, **_UNIT, "fetch_all": 0}, TopK),
}
_LISTED = ("longnet", "profile")
"""Families whose arguments are a list of any length."""


def read_pattern(text_or_path: str) -> LayerPatterns:
    """Parse a short form, or a file that holds a short form or JSON. Raises `ValueError` for anything else."""
    path = Path(text_or_path)
    if text_or_path.endswith(".json") or _is_path(path.is_file):
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"pattern {text_or_path!r}: the file cannot be read: {error}; name one that can, or give a short form "
                "such as sinks:64+window:512"
            ) from error
        if not text.strip():
            raise ValueError(f'pattern file {text_or_path} is empty: it needs a short form, or JSON with "groups"')
        try:
            return parse_pattern(text)
        except ValueError as error:
            raise ValueError(f"pattern file {text_or_path}: {error}") from error
    try:
        return parse_pattern(text_or_path)
    except ValueError as error:
        if not text_or_path or not _is_path(path.is_dir):
            raise
        raise ValueError(f"pattern {text_or_path!r} is a folder: name a file in it, or give a short form") from error


def _is_path(look: Callable[[], bool]) -> bool:
    try:
        return look()
    except OSError:  # a short form may exceed the longest file name
        return False


def parse_pattern(text: str) -> LayerPatterns:
    """Parse a short form or JSON text. Raises `ValueError` that names the wrong part and how to correct it."""
    if text.lstrip().startswith(("{", "[")):
        return _parse_json(text)
    groups = []
    with _name_errors(text):
        for part in text.split(";"):
            rule, at, layers = part.strip().partition("@")
            rules, dealt = _parse_rules(rule)
            groups.append(LayerGroup(rules, _parse_layers(layers) if at else None, dealt))
        return LayerPatterns(tuple(groups))


@contextmanager
def _name_errors(text: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"pattern {text!r}: {error}") from error


def _parse_rules(text: str) -> tuple[tuple[Rule, ...], bool]:
    """The rules of one group, and whether K/V heads take them in turn, as for longnet."""
    terms = [_parse_term(term.strip()) for term in text.split("+")]
    rules = tuple(reduce(or_, parts) for parts in product(*terms))
    return rules, len(rules) > 1


def _parse_term(text: str) -> tuple[Rule, ...]:
    name, _, rest = text.partition(":")
    words = [word.strip() for word in rest.split(",")] if rest else []
    if name in _LISTED:
        return _parse_list(name, words)
    if name not in _FAMILIES:
        families = ", ".join((*_FAMILIES, *_LISTED))
        no_file = ", and no such file is there" if "/" in name and not rest else ""
        raise ValueError(f"{name or text!r} is no family{no_file}; choose one of {families}")
    defaults, make = _FAMILIES[name]
    values, seen = dict(defaults), set[str]()
    for place, word in enumerate(words):
        key, has_key, value = word.rpartition("=")
        key = key.strip() if has_key else (list(defaults)[place] if place < len(defaults) else "")
        if key not in defaults:
            raise ValueError(f"{name} takes {', '.join(defaults) or 'nothing'}; {word!r} is none of these")
        if key in seen:
            raise ValueError(f"{name} has {key} twice; leave one out")
        seen.add(key)
        values[key] = _number(value, name)
    missing = [key for key, value in values.items() if value is None]
    if missing:
        raise ValueError(f"{name} needs {', '.join(missing)}, for example {name}:{_EXAMPLES[name]}")
    return (make(*values.values()),)


_EXAMPLES = {"window": "512", "sinks": "64", "strided": "16,2", "random": "4", "topk": "8"}


def _parse_list(name: str, words: list[str]) -> tuple[Rule, ...]:
    unit = 128 if name == "profile" else 1
    pairs: list[tuple[int, ...]] = []
    for word in words:
        key, has_key, value = word.rpartition("=")
        if not has_key:
            pairs.append(tuple(_number(number, name) for number in word.split("/")))
        elif key.strip() == "unit":
            unit = _number(value, name)
        else:
            raise ValueError(f"{name} takes a list and unit; {word!r} is neither")
    if name == "profile":
        return (Profile(tuple(n for pair in pairs for n in pair), unit),)
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ValueError("longnet takes segment/rate pairs, for example longnet:512/1,2048/4")
    segments, rates = zip(*pairs, strict=True)
    return tuple(Dilated(segments, rates, offset, unit) for offset in range(max(1, *rates)))


def _number(text: str, name: str) -> int:
    if not re.fullmatch(r"\s*\d+\s*", text):
        raise ValueError(f"{name} takes whole numbers, not {text.strip()!r}")
    if len(text.strip()) > MAX_DIGITS:
        raise ValueError(f"{name} takes numbers of at most {MAX_DIGITS} digits, not {text.strip()[:30]}...")
    return int(text)


def _parse_layers(text: str) -> tuple[int, ...]:
    """Layer numbers from a list with ranges such as `0,2-5`."""
    layers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"layers after @ are numbers and ranges such as 0,2-5, not {part!r}")
        if len(match[2] or match[1]) > 5 or int(match[2] or match[1]) > MAX_LAYER:
            raise ValueError(f"layers after @ are at most {MAX_LAYER:,}, not {part.strip()[:30]}")
        layers.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(layers)


# ------------------------------------------------------------ JSON files


def _parse_json(text: str) -> LayerPatterns:
    try:
        loaded: Any = plain_json(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(loaded, dict) or not isinstance(loaded.get("groups"), list):
        raise ValueError('give an object with "groups", a list of {"layers": [...], "rule": "window:512"}')
    _check_keys(loaded, {"block", "groups", "about", "measured"}, "the pattern")
    block = loaded.get("block", DEFAULT_BLOCK_TOKENS)
    if not _is_number(block):
        raise ValueError(f"block={block!r}: a whole number of tokens; 128 suits the kernels")
    return LayerPatterns(tuple(_parse_group(group) for group in loaded["groups"]), block)


def _parse_group(group: Any) -> LayerGroup:
    if not isinstance(group, dict) or ("rule" in group) == ("heads" in group):
        raise ValueError(f"group {group!r}: give an object with either a rule or heads")
    _check_keys(group, {"layers", "rule", "heads"}, "a group")
    layers = group.get("layers")
    if layers is not None:
        if not isinstance(layers, list) or not all(map(_is_number, layers)):
            raise ValueError(f"layers={layers!r}: a list of numbers counted from 0, or leave it out for the rest")
        layers = tuple(layers)
    if "rule" in group:
        text = str(group["rule"])
        with _name_errors(text):
            rules, dealt = _parse_rules(text)
        return LayerGroup(rules, layers, dealt)
    heads, mixed = group["heads"], list[Rule]()
    if not isinstance(heads, list) or not all(isinstance(part, dict) and "rule" in part for part in heads):
        raise ValueError(f'heads={heads!r}: a list of {{"count": 3, "rule": "window:512"}}')
    for part in heads:
        _check_keys(part, {"count", "rule"}, "an entry of heads")
        count, text = part.get("count", 1), str(part["rule"])
        with _name_errors(text):
            rules, dealt = _parse_rules(text)
        if not _is_number(count) or count < 1:
            raise ValueError(f"count={count!r}: how many query heads follow the rule, at least 1")
        if dealt:
            raise ValueError(f"rule {text!r}: longnet shifts its heads itself; give it as the group's rule")
        mixed.extend(rules * count)
    return LayerGroup(tuple(mixed), layers)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_keys(table: Mapping[str, object], allowed: set[str], place: str) -> None:
    unknown = sorted(set(table) - allowed)
    if unknown:
        raise ValueError(f"{place} has an unknown key {unknown[0]!r}; known are {', '.join(sorted(allowed))}")
