"""Digests of the user's own code: of a function or class, and of all of the user's that it refers to.

Of the source as Python reads it: without places, line numbers, comments and layout. What a module sets counts as its
assignment's source, never as a value, which may be a process's own. Libraries, Python's own and this one are apart; a
run records their versions. Nothing is imported or called.
"""

from __future__ import annotations

import ast
import dis
import hashlib
import importlib.util
import inspect
import io
import logging
import sys
import sysconfig
import textwrap
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property, partial
from pathlib import Path, PurePath
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

DIGITS = 16
CONSTANTS = (bool, int, float, complex, str, bytes, type(None))
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}
STANDS_FOR = {tokenize.INDENT: ">", tokenize.DEDENT: "<", tokenize.NEWLINE: "\n"}
NO_SOURCE = (OSError, TypeError, SyntaxError, ValueError, RecursionError, tokenize.TokenError)
MOST_ITEMS = 10_000
"""A container of more is data."""
DEEPEST = 8
PYTHON = f"py{sys.version_info.major}.{sys.version_info.minor}:"
"""Begins a digest of bytecode, which other Pythons have otherwise."""


def code_digest(part: Any) -> str:
    """The digest of what a part of a run is made of; empty where nothing of it is the user's."""
    found = _Found()
    found.visit(part)
    text = "\0".join(sorted(found.texts))
    begin = PYTHON if found.has_bytecode else ""
    return begin + hashlib.sha256(text.encode()).hexdigest()[:DIGITS] if text else ""


def changed_parts(there: Mapping[str, Any], here: Mapping[str, str]) -> list[str]:
    """The parts whose code is another than on record; bytecode of two Pythons says nothing."""
    known = {name: (str(there.get(name, "")), here.get(name, "")) for name in sorted({*there, *here})}
    return [name for name, two in known.items() if two[0] != two[1] and not _of_two_pythons(*two)]


def _of_two_pythons(one: str, other: str) -> bool:
    versions = [digest.rpartition(":")[0] for digest in (one, other)]
    return all(versions) and versions[0] != versions[1]


@dataclass
class _Assigned:
    """What a module's source says of its names."""

    values: dict[str, list[tuple[str, list[str]]]] = field(default_factory=dict)
    """name → (source, names in it) of each assignment."""
    imports: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """name, or "*" → (module, name there)."""


class _Found:
    """The source of everything of the user's that `visit` was given or that this refers to."""

    def __init__(self) -> None:
        self.texts: set[str] = set()
        self.has_bytecode = False
        self._seen: dict[int, Any] = {}  # held, so that no id comes twice
        self._left: list[Any] = []
        self._names_seen: set[tuple[int, str]] = set()
        self._modules: dict[str, _Assigned | None] = {}
        paths = sysconfig.get_paths()
        self._libraries = [str(Path(__file__).parents[1]), paths["stdlib"], paths["platstdlib"]]

    def visit(self, value: Any) -> None:
        self._left.append(value)
        while self._left:  # no recursion: a chain of code may be long
            one = self._left.pop()
            if id(one) not in self._seen and type(one) not in CONSTANTS and not isinstance(one, ModuleType):
                self._seen[id(one)] = one
                self._visit(one)

    def _visit(self, value: Any) -> None:
        if isinstance(value, partial):
            self._left += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, MethodType):
            self._left += [value.__func__, value.__self__]
        elif isinstance(value, (staticmethod, classmethod)):
            self._left.append(value.__func__)
        elif isinstance(value, property):
            self._left += [value.fget, value.fset]
        elif isinstance(value, cached_property):
            self._left.append(value.func)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, (tuple, list, set, frozenset, dict)):
            if len(value) <= MOST_ITEMS:
                self._left += list(value.values() if isinstance(value, dict) else value)
        else:
            own = getattr(value, "__dict__", {})
            if self._is_users(_file_of(type(value))):
                self._left += [type(value), *(one for one in own.values() if callable(one))]
            elif isinstance(own, dict):  # of a library, around the user's: a cache, a compiled module
                self._left += [own.get("__wrapped__"), own.get("_modules")]

    def _is_users(self, file: str) -> bool:
        path = Path(file)
        if file.startswith("<frozen") or {"site-packages", "dist-packages"} & set(path.parts):
            return False
        return not any(path.is_relative_to(one) for one in self._libraries)

    def _function(self, function: FunctionType) -> None:
        code, is_users = function.__code__, self._is_users(function.__code__.co_filename)
        self._left.append(getattr(function, "__wrapped__", None))
        uses = _Uses.of(code)
        for free, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # not filled yet
                value = cell.cell_contents
                if not is_users:  # a library's decorator
                    self._left += [value] if callable(value) else []
                    continue
                is_setting = is_dataclass(value) or not hasattr(value, "__dict__")  # other objects may count calls
                if is_setting and free not in uses.rebinds:
                    self._plain(f"{function.__qualname__} {free}", value)
                self._left.append(value)
        if not is_users:
            return
        source, names = self._source(code)
        self.texts.add(f"{function.__qualname__}: {source}")
        self._left += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        scope = function.__globals__
        for name in sorted({*uses.globals, *names}):
            self._global(scope, name, uses)
        for name, asked in uses.imports:
            with suppress(ImportError, ValueError):
                package = scope.get("__package__") or str(scope.get("__name__", "")).rpartition(".")[0]
                whole = importlib.util.resolve_name(name, package)
                self._imported(whole, asked, uses)

    def _imported(self, module: str, asked: Iterable[str], uses: _Uses) -> None:
        """What a function imports itself, where that is loaded."""
        for one in asked:
            if module in sys.modules and self._is_users(_module_file(sys.modules[module])):
                self._global(vars(sys.modules[module]), one, uses)
        if not asked:
            for known in {module, module.partition(".")[0]} & sys.modules.keys():
                self._attributes(sys.modules[known], uses)

    def _attributes(self, module: ModuleType, uses: _Uses) -> None:
        """What a function takes from a module of the user's and from those in it."""
        left, seen = [module], set[int]()
        while left:
            one = left.pop()
            if id(one) in seen or not self._is_users(_module_file(one)):
                continue
            seen.add(id(one))
            for name in sorted(uses.attributes & vars(one).keys()):
                value = vars(one)[name]
                if isinstance(value, ModuleType):
                    left.append(value)
                else:
                    self._global(vars(one), name, uses)

    def _global(self, scope: dict[str, Any], name: str, uses: _Uses) -> None:
        """What a name of a module stands for: code, and the source of what it was set to."""
        names = [(scope, name)]
        while names:
            scope, name = names.pop()
            if name not in scope or (name.startswith("__") and name.endswith("__")):
                continue
            value = scope[name]
            if isinstance(value, ModuleType):
                self._attributes(value, uses)
                continue
            if (id(scope), name) in self._names_seen or isinstance(value, (logging.Logger, PurePath)):
                continue
            self._names_seen.add((id(scope), name))
            self._left.append(value)
            assigned = self._assigned(scope)
            if assigned is None:  # a notebook
                if name not in uses.rebinds and not isinstance(value, (FunctionType, type)):
                    self._plain(name, value)
                continue
            for text, inner in assigned.values.get(name, ()):
                self.texts.add(f"{name} = {text}")
                names += [(scope, one) for one in inner]
            for module, there in [*assigned.imports.get(name, ()), *assigned.imports.get("*", ())]:
                found = sys.modules.get(module)
                if found is not None and self._is_users(_module_file(found)):
                    names.append((vars(found), name if there == "*" else there))

    def _class(self, cls: type) -> None:
        if not self._is_users(_file_of(cls)):
            return
        has_source, uses = False, _Uses()
        with suppress(*NO_SOURCE):  # of a notebook or a prompt: its methods have their source
            source = inspect.getsource(cls)
            self.texts.add(f"{cls.__qualname__}: {_tokens(source)}")
            has_source = True
            module = sys.modules.get(cls.__module__)
            for name in sorted(_outer_names(source)) if module is not None else ():
                self._global(vars(module), name, uses)
        self._left += cls.__bases__
        codes = [one.__code__ for one in vars(cls).values() if isinstance(one, FunctionType)]
        stored = {name for code in codes for name in _Uses.of(code).stores}
        for name, value in vars(cls).items():
            made = not isinstance(value, FunctionType) or value.__code__.co_filename == "<string>"  # by a dataclass
            if not (name.startswith("__") and made):
                self._left.append(value)
                if not has_source and name not in stored and not name.startswith("_"):
                    self._plain(f"{cls.__qualname__}.{name}", value)

    def _plain(self, name: str, value: Any) -> None:
        text = self._value(value)
        if text is not None:
            self.texts.add(f"{name} = {text}")

    def _value(self, value: Any, depth: int = 0) -> str | None:
        """A setting's value: constants that are no places, containers and objects of them; None for anything else."""
        if depth > DEEPEST:
            return None
        if type(value) in CONSTANTS:
            return "" if isinstance(value, str) and _is_place(value) else repr(value)
        if isinstance(value, dict):
            parts = [*value, *value.values()]
        elif isinstance(value, (tuple, list, set, frozenset)):
            parts = list(value)
        elif is_dataclass(value) and not isinstance(value, type):
            parts = [(one.name, getattr(value, one.name, None)) for one in fields(value)]
        elif type(value) is SimpleNamespace or (self._is_users(_file_of(type(value))) and not callable(value)):
            parts = list(getattr(value, "__dict__", {}).items())
        else:
            return None
        if len(parts) > MOST_ITEMS:
            return None
        told = [self._value(one, depth + 1) for one in parts]
        if None in told:
            return None
        words = [str(one) for one in told]
        if isinstance(value, dict):
            words = sorted(map(": ".join, zip(words[: len(value)], words[len(value) :], strict=True)))
        elif isinstance(value, (set, frozenset)):
            words.sort()
        return f"{type(value).__qualname__}({', '.join(words)})"

    def _source(self, code: CodeType) -> tuple[str, set[str]]:
        """(a function's source, names of its defaults and decorators); instructions where it has no file."""
        with suppress(*NO_SOURCE):
            if code.co_name == "<lambda>":
                return _tokens(f"({_lambda_source(code)})"), set()
            source = inspect.getsource(code)
            return _tokens(source), _outer_names(source)
        self.has_bytecode = True
        return _instructions(code), set()

    def _assigned(self, scope: dict[str, Any]) -> _Assigned | None:
        """What the source of a module sets; None where it has none."""
        name = str(scope.get("__name__", ""))
        module = sys.modules.get(name)
        if module is None or vars(module) is not scope:
            return None
        if name not in self._modules:
            self._modules[name] = None
            with suppress(*NO_SOURCE):
                self._modules[name] = _read_module(inspect.getsource(module), scope)
        return self._modules[name]


@dataclass
class _Uses:
    """The names that a function uses, with the functions within it."""

    globals: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    rebinds: set[str] = field(default_factory=set)
    stores: set[str] = field(default_factory=set)
    """Attributes that it sets."""
    imports: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    """(module with its leading dots, names from it)."""

    @classmethod
    def of(cls, code: CodeType) -> _Uses:
        found, left = cls(), [code]
        kinds = {
            "LOAD_GLOBAL": found.globals,
            "LOAD_NAME": found.globals,
            "LOAD_ATTR": found.attributes,
            "LOAD_METHOD": found.attributes,
            "STORE_GLOBAL": found.rebinds,
            "STORE_DEREF": found.rebinds,
            "STORE_ATTR": found.stores,
        }
        while left:
            one = left.pop()
            left += [constant for constant in one.co_consts if isinstance(constant, CodeType)]
            before: list[Any] = [0, None]
            for step in dis.get_instructions(one):
                if step.opname == "IMPORT_NAME":
                    level = before[-2] if isinstance(before[-2], int) else 0
                    found.imports.append(("." * level + str(step.argval), tuple(before[-1] or ())))
                elif step.opname in kinds:
                    kinds[step.opname].add(str(step.argval))
                before = [before[-1], step.argval]
        return found


def _outer_names(source: str) -> set[str]:
    """The names outside of function bodies: of defaults and decorators, and of what a class sets."""
    with suppress(*NO_SOURCE):
        return set(_outside(ast.parse(textwrap.dedent(source))))
    return set()


def _outside(node: ast.AST) -> Iterator[str]:
    left = [node]
    while left:
        one = left.pop()
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load):
            yield one.id
        elif isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            left += [*getattr(one, "decorator_list", []), *one.args.defaults, *filter(None, one.args.kw_defaults)]
        else:
            left += ast.iter_child_nodes(one)


def _read_module(source: str, scope: Mapping[str, Any]) -> _Assigned:
    """The assignments and imports of a module, also those under a condition."""
    found, left = _Assigned(), list[ast.AST](ast.parse(source).body)
    package = scope.get("__package__") or ""
    while left:
        node = left.pop()
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value is not None:
            text = _tokens(f"({ast.get_source_segment(source, node.value)})", places=False)
            names = [one.id for one in ast.walk(node.value) if isinstance(one, ast.Name)]
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                at = ast.get_source_segment(source, target) or ""
                for one in ast.walk(target):
                    if isinstance(one, ast.Name):
                        begin = "" if isinstance(node, ast.Assign) and isinstance(target, ast.Name) else f"{at}: "
                        found.values.setdefault(one.id, []).append((begin + text, names))
        elif isinstance(node, ast.ImportFrom):
            with suppress(ImportError):
                module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                for alias in node.names:
                    found.imports.setdefault(alias.asname or alias.name, []).append((module, alias.name))
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.For, ast.While)):
            left += ast.iter_child_nodes(node)
        elif isinstance(node, (ast.ExceptHandler, ast.match_case, ast.Match)):
            left += node.cases if isinstance(node, ast.Match) else node.body
    return found


def _lambda_source(code: CodeType) -> str:
    """By where its instructions are: others may be on the same line. Raises OSError where there is no file."""
    lines = inspect.findsource(code)[0]
    source = "".join(lines)
    spans = [(line, at, end, to) for line, end, at, to in code.co_positions() if None not in (line, end, at, to)]
    places = [span for span in spans if span[:2] != span[2:]]  # of none is what begins a function
    first, last = min(one[:2] for one in places), max(one[2:] for one in places)
    around = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Lambda)
        and (node.lineno, node.col_offset) <= first
        and last <= (node.end_lineno or 0, node.end_col_offset or 0)
    ]
    if not around:
        raise OSError(f"no lambda in line {code.co_firstlineno} of {code.co_filename}")
    inner = max(around, key=lambda node: (node.lineno, node.col_offset))
    return ast.get_source_segment(source, inner) or ""


def _instructions(code: CodeType) -> str:
    consts = [_instructions(one) if isinstance(one, CodeType) else _sorted_repr(one) for one in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {consts}"


def _sorted_repr(value: Any) -> str:
    """Strings in a set are in another order in each process."""
    if isinstance(value, (tuple, frozenset)):
        inner = map(_sorted_repr, value)
        return f"({', '.join(inner if isinstance(value, tuple) else sorted(inner))})"
    return repr(value)


def _tokens(source: str, *, places: bool = True) -> str:
    try:
        read = tokenize.generate_tokens(io.StringIO(textwrap.dedent(source)).readline)
        kept = [token for token in read if token.type not in LAYOUT]
        return "".join(
            "''"
            if not places and token.type == tokenize.STRING and _is_place(token.string.lstrip("rbRB").strip("'\""))
            else STANDS_FOR.get(token.type, token.string)
            for token in kept
        )
    except (tokenize.TokenError, SyntaxError):
        return source


def _is_place(text: str) -> bool:
    return text.startswith(("/", "~")) or "://" in text


def _module_file(module: ModuleType) -> str:
    if module.__name__.partition(".")[0] in {*sys.stdlib_module_names} - {"__main__"}:
        return "<frozen>"
    paths = getattr(module, "__path__", None)  # of a namespace package
    return getattr(module, "__file__", None) or next(iter(paths or ()), "")


def _file_of(cls: type) -> str:
    """Where a class is from; empty for a notebook's, or a prompt's."""
    top = cls.__module__.partition(".")[0]
    if top in sys.stdlib_module_names:
        return "<frozen>"
    known = (getattr(sys.modules.get(name), "__file__", None) for name in (cls.__module__, top))
    return next((file for file in known if file), "")
