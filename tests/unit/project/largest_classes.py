"""The classes of the package that assign most attributes to themselves; fields of frozen data and of settings are none.

python -m tests.unit.project.largest_classes
"""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[3] / "elastic_ring"


def attributes(kind: ast.ClassDef) -> set[str]:
    """What its methods assign to `self`."""
    return {
        node.attr
        for node in ast.walk(kind)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def largest() -> list[tuple[int, str]]:
    """(number of attributes, file and class), most first."""
    found = [
        (len(attributes(node)), f"{path.relative_to(PACKAGE).as_posix()} {node.name}")
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    return sorted(found, reverse=True)


if __name__ == "__main__":
    for number, name in largest()[:10]:
        print(f"{number:3} {name}")
