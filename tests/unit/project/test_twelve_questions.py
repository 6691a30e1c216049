"""The answers to the twelve questions are where they say; a change that moves one moves its row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_each_answer_names_a_room_a_file_of_it_and_a_function_there() -> None:
    page = (ROOT / "tests" / "unit" / "project" / "twelve_questions.md").read_text(encoding="utf-8")
    answers = re.findall(r"^\| .*\? \| `([\w/]+)` \| `([\w/.]+)`, `(\w+)` \|$", page, re.MULTILINE)
    assert len(answers) == 12
    for room, file, function in answers:
        assert file.startswith(f"elastic_ring/{room}/"), file
        nodes = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        assert function in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}, (file, function)
