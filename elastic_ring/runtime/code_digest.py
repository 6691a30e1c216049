"""Digests of the user's own code: of a function or class, and of all of the user's that it refers to.

Of the source as Python reads it: without places, line numbers, comments and layout. Libraries, Python's own and this
one are apart; a run records their versions. Nothing is imported or called.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import site
import sys
import sysconfig
import textwrap
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

DIGITS = 16
CONSTANTS = (bool, int, float, complex, str, bytes, type(None))
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}
STANDS_FOR = {tokenize.INDENT: ">", tokenize.DEDENT: "<", tokenize.NEWLINE: "\n"}


def code_digest(part: Any) -> str:
    """The digest of what a part of a run is made of; empty where nothing of it is the user's."""
    found = _Found()
    found.visit(part)
    text = "\0".join(sorted(found.texts))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS] if text else ""


def changed_parts(there: Mapping[str, Any], here: Mapping[str, str]) -> list[str]:
    """The parts whose code is another than on record."""
    return [name for name in sorted({*there, *here}) if there.get(name, "") != here.get(name, "")]


class _Found:
    """The source of everything of the user's that `visit` was given or that this refers to."""

    def __init__(self) -> None:
        self.texts: set[str] = set()
        self._seen: dict[int, Any] = {}  # held, so that no id comes twice
        self._libraries = _libraries()

    def visit(self, value: Any) -> None:
        if id(value) in self._seen or isinstance(value, ModuleType):
            return
        self._seen[id(value)] = value
        if isinstance(value, partial):
            self._each([value.func, *value.args, *value.keywords.values()])
        elif isinstance(value, MethodType):
            self._each([value.__func__, value.__self__])
        elif isinstance(value, (staticmethod, classmethod)):
            self.visit(value.__func__)
        elif isinstance(value, property):
            self._each([value.fget, value.fset])
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, (tuple, list)):
            self._each(value)
        elif self._is_users(_file_of(type(value))):
            self.visit(type(value))
            self._each(one for one in getattr(value, "__dict__", {}).values() if callable(one))

    def _is_users(self, file: str) -> bool:
        return not file.startswith("<frozen") and not any(Path(file).is_relative_to(one) for one in self._libraries)

    def _each(self, values: Iterable[Any]) -> None:
        for value in values:
            self.visit(value)

    def _function(self, function: FunctionType) -> None:
        if not self._is_users(function.__code__.co_filename):
            return
        name = function.__qualname__
        self.texts.add(f"{name}: {_source(function.__code__)}")
        self._each([*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()])
        self.visit(getattr(function, "__wrapped__", None))
        for free, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                self._named(f"{name} {free}", cell.cell_contents)
            except ValueError:  # not filled yet
                continue
        used = set(_names(function.__code__))
        for known in used & function.__globals__.keys():
            value = function.__globals__[known]
            self._named(known, value)
            if isinstance(value, ModuleType) and self._is_users(getattr(value, "__file__", None) or ""):
                for attribute in used & vars(value).keys():
                    self._named(f"{known}.{attribute}", vars(value)[attribute])

    def _class(self, cls: type) -> None:
        if not self._is_users(_file_of(cls)):
            return
        with suppress(OSError, TypeError):  # of a notebook or a prompt: its methods have their source
            self.texts.add(f"{cls.__qualname__}: {_tokens(inspect.getsource(cls))}")
        self._each(cls.__bases__)
        for name, value in vars(cls).items():
            made = not isinstance(value, FunctionType) or value.__code__.co_filename == "<string>"  # by a dataclass
            if not (name.startswith("__") and made):
                self._named(f"{cls.__qualname__}.{name}", value)

    def _named(self, name: str, value: Any) -> None:
        """What a name stands for: a constant that is no place, or code."""
        if type(value) in CONSTANTS or (isinstance(value, tuple) and all(type(one) in CONSTANTS for one in value)):
            if not (isinstance(value, str) and (value.startswith(("/", "~")) or "://" in value)):
                self.texts.add(f"{name} = {value!r}")
        else:
            self.visit(value)


def _names(code: CodeType) -> Iterator[str]:
    """The globals and attributes that a function uses, and the functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _source(code: CodeType) -> str:
    """A function's source; of a lambda, which shares its line with others, and without a file its instructions."""
    with suppress(OSError, TypeError):
        if code.co_name != "<lambda>":
            return _tokens(inspect.getsource(code))
    consts = [_source(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {consts}"


def _tokens(source: str) -> str:
    try:
        read = tokenize.generate_tokens(io.StringIO(textwrap.dedent(source)).readline)
        return "".join(STANDS_FOR.get(token.type, token.string) for token in read if token.type not in LAYOUT)
    except (tokenize.TokenError, SyntaxError):
        return source


def _file_of(cls: type) -> str:
    """Where a class is from; empty for a notebook's, or a prompt's."""
    top = cls.__module__.partition(".")[0]
    if top in sys.stdlib_module_names:
        return "<frozen>"
    known = (getattr(sys.modules.get(name), "__file__", None) for name in (cls.__module__, top))
    return next((file for file in known if file), "")


def _libraries() -> list[str]:
    paths = sysconfig.get_paths()
    own = [str(Path(__file__).parents[1])]
    return [*own, *{paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}, site.getusersitepackages()]
