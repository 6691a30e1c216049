"""Digests of the user's own code: of a function or class, and of the user's code that it reaches.

The tokens of its source count, without comments, layout and line numbers; bytecode stands in where there is no source.
A module's setting counts by its assignment, a notebook's by its value; paths and URLs do not count. Libraries are left
out: a run records their versions. Nothing is imported or called.
"""

from __future__ import annotations

import ast
import dis
import hashlib
import importlib.util
import inspect
import io
import logging
import pprint
import re
import sys
import sysconfig
import textwrap
import tokenize
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path, PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any

BYTECODE = f"py{sys.version_info.major}.{sys.version_info.minor}:"
"""Begins a digest of bytecode, which is another in each Python."""
DIGITS = 16
CONSTANTS = (bool, int, float, complex, str, bytes, type(None))
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}
STANDS_FOR = {tokenize.INDENT: ">", tokenize.DEDENT: "<", tokenize.NEWLINE: "\n"}
NO_SOURCE = (OSError, TypeError, SyntaxError, ValueError, RecursionError, tokenize.TokenError)
WRAPPERS = ("__func__", "__self__", "__wrapped__", "func", "args", "keywords", "fget", "fset", "_modules")
"""Attributes of a library's object that may hold the user's code: methods, partials, properties, compiled modules."""
MAX_ELEMENTS = 10_000
"""A larger container is data."""


def code_digest(part: Any) -> str:
    """The digest of the user's code that `part` reaches; empty where it reaches none."""
    reached = _Reached()
    reached.visit(part)
    text = "\0".join(sorted(reached.texts))
    begin = BYTECODE if reached.has_bytecode else ""
    return begin + hashlib.sha256(text.encode()).hexdigest()[:DIGITS] if text else ""


def changed_parts(recorded: Mapping[str, object], submitted: Mapping[str, str]) -> list[str]:
    """The names of the parts with another digest. Digests of two Pythons' bytecode are not compared."""
    changed = []
    for name in sorted({*recorded, *submitted}):
        before, now = str(recorded.get(name, "")), submitted.get(name, "")
        pythons = {digest.partition(":")[0] for digest in (before, now) if ":" in digest}
        if before != now and len(pythons) < 2:
            changed.append(name)
    return changed


@dataclass
class _Names:
    """The names that code uses, nested functions and class bodies included."""

    loaded: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    rebound: set[str] = field(default_factory=set)
    """Globals, closure variables and attributes that it sets: they may count calls."""
    modules: set[str] = field(default_factory=set)
    """Modules that a function imports itself, with their leading dots."""

    @classmethod
    def of(cls, code: CodeType) -> _Names:
        names, pending = cls(), [code]
        sets = {
            "LOAD_GLOBAL": names.loaded,
            "LOAD_NAME": names.loaded,
            "LOAD_ATTR": names.attributes,
            "LOAD_METHOD": names.attributes,
            "IMPORT_FROM": names.attributes,
            "STORE_GLOBAL": names.rebound,
            "STORE_DEREF": names.rebound,
            "STORE_ATTR": names.rebound,
        }
        while pending:
            code = pending.pop()
            pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
            constants: list[Any] = [0, None]  # of an import: its level, its names
            for step in dis.get_instructions(code):
                if step.opname == "IMPORT_NAME":
                    names.modules.add("." * (constants[-2] or 0) + str(step.argval))
                elif step.opname in sets:
                    sets[step.opname].add(str(step.argval))
                constants = [constants[-1], step.argval]
        return names


class _Reached:
    """The texts of the user's code that `visit` reaches."""

    def __init__(self) -> None:
        self.texts: set[str] = set()
        self.has_bytecode = False
        self._seen: dict[int, Any] = {}  # holds the objects, so that no id comes twice
        self._pending: list[Any] = []
        self._globals_seen: set[tuple[int, str]] = set()
        self._bindings: dict[str, tuple[str, dict[str, list[ast.stmt]]] | None] = {}
        paths = sysconfig.get_paths()
        self._libraries = [str(Path(__file__).parents[1]), paths["stdlib"], paths["platstdlib"]]

    def visit(self, value: Any) -> None:
        self._pending.append(value)
        while self._pending:  # no recursion: a chain of code may be long
            value = self._pending.pop()
            if id(value) in self._seen or type(value) in CONSTANTS or isinstance(value, ModuleType):
                continue
            self._seen[id(value)] = value
            if isinstance(value, FunctionType):
                self._visit_function(value)
            elif isinstance(value, type):
                self._visit_class(value)
            elif isinstance(value, (tuple, list, set, frozenset, dict)):
                if len(value) <= MAX_ELEMENTS:
                    self._pending += value.values() if isinstance(value, dict) else value
            elif self._is_users(_file_of(type(value))):
                own = getattr(value, "__dict__", {})
                self._pending += [type(value), *(attribute for attribute in own.values() if callable(attribute))]
            else:
                with suppress(Exception):  # whatever a library's property raises
                    self._pending += [getattr(value, name, None) for name in WRAPPERS]

    def _visit_function(self, function: FunctionType) -> None:
        code, is_users = function.__code__, self._is_users(function.__code__.co_filename)
        names = _Names.of(code)
        self._pending.append(getattr(function, "__wrapped__", None))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # not filled yet
                value = cell.cell_contents
                if is_users or callable(value):  # of a library's decorator only the decorated function
                    self._pending.append(value)
                if is_users and name not in names.rebound:
                    self._add_setting(f"{function.__qualname__} {name}", value)
        if not is_users:
            return
        self._pending += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        try:
            if code.co_name == "<lambda>":
                raise OSError("its source is the whole line")
            text, outer = _tokens_and_names(inspect.getsource(code))
            names.loaded |= outer.loaded  # of defaults and decorators, too
        except NO_SOURCE:
            self.has_bytecode = True
            text = _bytecode(code)
        self.texts.add(f"{function.__qualname__}: {text}")
        self._follow_names(function.__globals__, names)

    def _visit_class(self, cls: type) -> None:
        if not self._is_users(_file_of(cls)):
            return
        has_source, module = False, sys.modules.get(cls.__module__)
        with suppress(*NO_SOURCE):  # a notebook's class has none, its methods may
            text, names = _tokens_and_names(inspect.getsource(cls))
            self.texts.add(f"{cls.__qualname__}: {text}")
            has_source = True
            if module is not None:
                self._follow_names(vars(module), names)
        functions = [value for value in vars(cls).values() if isinstance(value, FunctionType)]
        rebound = {name for function in functions for name in _Names.of(function.__code__).rebound}
        self._pending += cls.__bases__
        for name, value in vars(cls).items():
            is_generated = not isinstance(value, FunctionType) or value.__code__.co_filename == "<string>"
            if not (name.startswith("__") and is_generated):  # a dataclass generates methods
                self._pending.append(value)
                if not has_source and name not in rebound and not name.startswith("_"):
                    self._add_setting(f"{cls.__qualname__}.{name}", value)

    def _follow_names(self, scope: dict[str, object], names: _Names) -> None:
        for name in sorted(names.loaded):
            self._follow_global(scope, name, names)
        package = str(scope.get("__package__") or "") or str(scope.get("__name__", "")).rpartition(".")[0]
        for name in sorted(names.modules):
            with suppress(ImportError, ValueError):
                whole = importlib.util.resolve_name(name, package)
                for loaded in {whole, whole.partition(".")[0]} & sys.modules.keys():
                    self._follow_attributes(sys.modules[loaded], names)

    def _follow_attributes(self, module: ModuleType, names: _Names) -> None:
        """The names that code takes from one of the user's modules, and from the modules in it."""
        pending, seen = [module], set[int]()
        while pending:
            module = pending.pop()
            if id(module) in seen or not self._is_users(_module_file(module)):
                continue
            seen.add(id(module))
            for name in sorted(names.attributes & vars(module).keys()):
                value = vars(module)[name]
                if isinstance(value, ModuleType):
                    pending.append(value)
                else:
                    self._follow_global(vars(module), name, names)

    def _follow_global(self, scope: dict[str, object], name: str, names: _Names) -> None:
        """The value of a module's name, and the source of what it was set to, in the module where that stands."""
        pending = [(scope, name)]
        while pending:
            scope, name = pending.pop()
            value = scope.get(name)
            if name not in scope or (name.startswith("__") and name.endswith("__")):
                continue
            if isinstance(value, ModuleType):
                self._follow_attributes(value, names)
                continue
            if (id(scope), name) in self._globals_seen or isinstance(value, (logging.Logger, PurePath)):
                continue
            self._globals_seen.add((id(scope), name))
            self._pending.append(value)
            module = self._module_bindings(scope)
            if module is None:  # a notebook
                if name not in names.rebound and not isinstance(value, (FunctionType, type)):
                    self._add_setting(name, value)
                continue
            source, bindings = module
            for statement in (*bindings.get(name, ()), *bindings.get("*", ())):
                if isinstance(statement, ast.ImportFrom):
                    relative = "." * statement.level + (statement.module or "")
                    origin = sys.modules.get(importlib.util.resolve_name(relative, str(scope.get("__package__") or "")))
                    if origin is not None and self._is_users(_module_file(origin)):
                        names_there = {alias.asname or alias.name: alias.name for alias in statement.names}
                        pending.append((vars(origin), names_there.get(name, name)))
                else:
                    segment = ast.get_source_segment(source, statement) or ""
                    self.texts.add(f"{name}: {_without_places(_tokens(segment))}")
                    pending += [(scope, node.id) for node in ast.walk(statement) if isinstance(node, ast.Name)]

    def _module_bindings(self, scope: dict[str, object]) -> tuple[str, dict[str, list[ast.stmt]]] | None:
        """A module's source, and by name the statements outside of functions that bind it; None without a source."""
        name = str(scope.get("__name__", ""))
        module = sys.modules.get(name)
        if module is None or vars(module) is not scope:
            return None
        if name not in self._bindings:
            self._bindings[name] = None
            with suppress(*NO_SOURCE):
                source = inspect.getsource(module)
                self._bindings[name] = source, _bindings_of(ast.parse(source))
        return self._bindings[name]

    def _is_users(self, file: str) -> bool:
        path = Path(file)
        if file.startswith("<frozen") or {"site-packages", "dist-packages"} & set(path.parts):
            return False
        return not any(path.is_relative_to(library) for library in self._libraries)

    def _add_setting(self, name: str, value: Any) -> None:
        """Constants, and containers of them, by their value; other objects may hold what differs in each process."""
        if _is_plain(value) and len(text := pprint.saferepr(value)) <= MAX_ELEMENTS:
            self.texts.add(f"{name} = {_without_places(text)}")


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return _is_plain((*value, *value.values()))
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(map(_is_plain, value))
    if is_dataclass(value) and not isinstance(value, type):
        return _is_plain(vars(value))
    return type(value) in CONSTANTS


def _bindings_of(tree: ast.Module) -> dict[str, list[ast.stmt]]:
    """The assignments and `from` imports of a module, also under a condition, by the names that they bind."""
    bindings: dict[str, list[ast.stmt]] = {}
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        names: list[str] = []
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.asname or alias.name for alias in node.names]
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.expr)):
            pending += ast.iter_child_nodes(node)
        for name in names:
            bindings.setdefault(name, []).append(node)  # type: ignore[arg-type]
    return bindings


def _tokens_and_names(source: str) -> tuple[str, _Names]:
    source = textwrap.dedent(source)
    return _tokens(source), _Names.of(compile(source, "<source>", "exec"))


def _tokens(source: str) -> str:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return "".join(STANDS_FOR.get(token.type, token.string) for token in tokens if token.type not in LAYOUT)


def _bytecode(code: CodeType) -> str:
    constants = [_bytecode(part) if isinstance(part, CodeType) else _constant(part) for part in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"


def _constant(value: Any) -> str:
    """The text of a constant; strings in a set have another order in each process."""
    if isinstance(value, (tuple, frozenset)):
        texts = list(map(_constant, value))
        return f"({', '.join(texts if isinstance(value, tuple) else sorted(texts))})"
    return repr(value)


def _without_places(text: str) -> str:
    """Empty strings for paths and URLs."""
    return re.sub(r"""(['"])(?:[/~]|[A-Za-z0-9+.-]+://).*?\1""", "''", text)


def _module_file(module: ModuleType) -> str:
    if module.__name__.partition(".")[0] in {*sys.stdlib_module_names} - {"__main__"}:
        return "<frozen>"
    paths = getattr(module, "__path__", None)  # of a namespace package
    return getattr(module, "__file__", None) or next(iter(paths or ()), "")


def _file_of(cls: type) -> str:
    """The file of a class's module; empty for a notebook's."""
    top = cls.__module__.partition(".")[0]
    if top in sys.stdlib_module_names:
        return "<frozen>"
    files = (getattr(sys.modules.get(name), "__file__", None) for name in (cls.__module__, top))
    return next((file for file in files if file), "")
