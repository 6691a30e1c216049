"""What the package weighs, counted by `ast`: lines, modules, functions, untyped mappings, names that are no names.

python -m tests.unit.project.counters             prints each counter, its bound of today and its aim
python -m tests.unit.project.counters --names     prints where the names that are no names stand

Two more take a person or a run: the files of a new fact (`docs/architecture.md` lists them), and the files and
hand-overs of a worker's death, 15 and 5 (`python -m tests.ray.walk_of_a_death`).
"""

from __future__ import annotations

import argparse
import ast
import statistics
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
NO_NAMES = frozenset(
    "found told asked said one others wanted given taken made gone known what who told_of".split()  # noqa: SIM905
)
"""Words that name no thing. As a whole name each counts once for each place that binds it."""
MAPPINGS = {"dict", "Mapping"}
PROPERTIES = {"property", "cached_property", "setter", "getter", "deleter"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Bound(NamedTuple):
    today: float
    aim: float
    is_floor: bool = False

    def holds(self, count: float) -> bool:
        return count >= self.today if self.is_floor else count <= self.today


BOUNDS = {
    "lines of the package": Bound(70_170, 60_000),
    "modules besides __init__.py": Bound(294, 300),  # reference.py: a shrunk model beside plain transformers
    "functions": Bound(3_605, 3_400),
    "lines of a function, median": Bound(8, 8, is_floor=True),
    "methods of the largest class": Bound(25, 25),
    "lines with dict[str, Any], Mapping[str, Any] or an alias": Bound(101, 150),
    "names that are no names": Bound(0, 0),
    "lines of tests": Bound(65_850, 56_000),
}
"""A change that makes a counter better lowers its bound. Who raises one says why."""


class Module(NamedTuple):
    path: Path
    nodes: tuple[ast.AST, ...]
    """All of its tree: a walk takes longer than a search in it."""

    @property
    def dotted_name(self) -> str:
        return ".".join(self.path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def modules(folder: str = "elastic_ring") -> tuple[Module, ...]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    return tuple(Module(path, tuple(ast.walk(ast.parse(path.read_bytes())))) for path in paths)


def num_lines(folder: str) -> int:
    return sum(path.read_bytes().count(b"\n") for path in (ROOT / folder).rglob("*.py"))


def is_empty(statement: ast.stmt) -> bool:
    is_value = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_value or isinstance(statement, ast.Pass)


def is_plain(function: Function) -> bool:
    """Whether it is no property, dunder, overload or stub."""
    decorators = {last_name(decorator) for decorator in function.decorator_list}
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    is_stub = not body or (len(body) == 1 and is_empty(body[0]))
    is_dunder = function.name.startswith("__") and function.name.endswith("__")
    return not (decorators & (PROPERTIES | {"overload"}) or is_dunder or is_stub)


def function_lines() -> list[int]:
    """The length of each function and method, nested ones too, without its decorators."""
    return [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for module in modules()
        for node in module.nodes
        if isinstance(node, Function) and is_plain(node)
    ]


def num_methods() -> list[tuple[int, str]]:
    """(number of methods, module and class), most first."""
    classes = [
        (sum(isinstance(part, Function) for part in node.body), f"{module.dotted_name} {node.name}")
        for module in modules()
        for node in module.nodes
        if isinstance(node, ast.ClassDef)
    ]
    return sorted(classes, reverse=True)


def last_name(node: ast.AST) -> str:
    """`Any` of `Any` and of `typing.Any`."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def is_untyped(node: ast.AST | None) -> bool:
    """Whether it is `dict[str, Any]` or `Mapping[str, Any]`, by whatever module's name."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Tuple):
        return False
    return last_name(node.value) in MAPPINGS and [last_name(part) for part in node.slice.elts] == ["str", "Any"]


def aliases(module: Module) -> set[str]:
    """The names that a module gives to untyped mappings."""
    names: set[str] = set()
    for node in module.nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_untyped(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def untyped_lines() -> list[str]:
    """Each line that names an untyped mapping, itself or by an alias of this module or of one that it imports."""
    exported = {module.dotted_name: aliases(module) for module in modules()}
    lines = []
    for module in modules():
        names = set(exported[module.dotted_name])
        for node in module.nodes:
            if isinstance(node, ast.ImportFrom):
                names |= {a.asname or a.name for a in node.names if a.name in exported.get(node.module or "", ())}
        numbers = {
            node.lineno
            for node in module.nodes
            if is_untyped(node) or (isinstance(node, ast.Name) and node.id in names)
        }
        lines += [f"{module.path.relative_to(ROOT)}:{number}" for number in sorted(numbers)]
    return lines


def bound_names(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, name) of what assignments, loops, `with`, walruses and comprehensions bind, of parameters, of dataclass
    fields, and of what is assigned to `self`."""
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self")):
                yield node.lineno, name
            case _:
                pass


def no_names() -> list[str]:
    return [
        f"{module.path.relative_to(ROOT)}:{line} {name}"
        for module in modules()
        for line, name in bound_names(module.nodes)
        if name in NO_NAMES
    ]


def counters() -> dict[str, float]:
    lines = function_lines()
    return {
        "lines of the package": num_lines("elastic_ring"),
        "modules besides __init__.py": sum(module.path.name != "__init__.py" for module in modules()),
        "functions": len(lines),
        "lines of a function, median": statistics.median(lines),
        "methods of the largest class": num_methods()[0][0],
        "lines with dict[str, Any], Mapping[str, Any] or an alias": len(untyped_lines()),
        "names that are no names": len(no_names()),
        "lines of tests": num_lines("tests"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true", help="print the names that are no names instead")
    if parser.parse_args().names:
        print("\n".join(no_names()))
        return
    print(f"{'':56}     now   bound     aim")
    for title, count in counters().items():
        bound = BOUNDS[title]
        print(f"{title:56} {count:7,} {bound.today:7,} {'>=' if bound.is_floor else '<='} {bound.aim:6,}")


if __name__ == "__main__":
    main()
