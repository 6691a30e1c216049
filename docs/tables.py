"""Writes into the pages what the code says: tables of commands, submissions, errors, timeouts; whole examples.

python docs/tables.py
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path

from elastic_ring import errors
from elastic_ring.cli import COMMANDS
from elastic_ring.cli.endings import ENDINGS
from elastic_ring.config import Timeouts
from elastic_ring.runtime.driver.submission_rules import RULES
from elastic_ring.validation import docstrings

HERE = Path(__file__).resolve().parent


def tables() -> dict[tuple[str, str], str]:
    """Each table, by its page and the name of its first column."""
    root = errors.ElasticRingError
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__base__ is root]
    said = docstrings(Timeouts)
    return {
        ("quickstart.md", "command"): table(
            "command | what it does", *(f"`elastic-ring {name}` | {says}" for name, (_, says) in COMMANDS.items())
        ),
        ("quickstart.md", "the run"): table(
            "the run | the submission", *(" ".join((rule.__doc__ or "").split()) for rule in RULES)
        ),
        ("models.md", "outcome"): table("outcome | model types of transformers", *model_types()),
        ("operating/mend.md", "how it ends"): table(
            "how it ends | status | last line begins | then",
            *(
                f"{end.how} | {end.status} | {f'`{end.begins.strip()}`' if end.begins else ''} | {end.then}"
                for end in ENDINGS
            ),
        ),
        ("operating/mend.md", "error"): table(
            "error | meaning, and what to do",
            *(f"`{kind.__name__}` | {' '.join((kind.__doc__ or '').split())}" for kind in kinds),
        ),
        ("operating/mend.md", "timeout"): table(
            "timeout | seconds | what it bounds",
            *(f"`{field.name}` | {field.default} | {said[field.name]}" for field in dataclasses.fields(Timeouts)),
        ),
    }


def model_types() -> list[str]:
    """Rows of the types of models by what becomes of them, as `tests/unit/integrations/model_fuzz.py` recorded it."""
    record = json.loads((HERE / "images" / "model_types.json").read_text(encoding="utf-8"))
    outcomes = ["equal", *sorted({*record.values()} - {"equal"})]
    return [
        f"{'trained' if outcome == 'equal' else f'refused: {outcome}'} | "
        + ", ".join(f"`{kind}`" for kind, its in record.items() if its == outcome)
        for outcome in outcomes
    ]


def table(head: str, *rows: str) -> str:
    line = "---|" * len(head.split("|"))
    return f"| {head} |\n|{line}\n" + "".join(f"| {row} |\n" for row in rows)


EXAMPLE = re.compile(r"(<!-- (examples/\w+\.py) -->\n```python\n)(.*?)^```$", re.MULTILINE | re.DOTALL)
"""A block of Python below a comment that names its file."""


def with_examples(page: str) -> str:
    """The page with each example as its file has it."""

    def block(match: re.Match[str]) -> str:
        return match[1] + (HERE.parent / match[2]).read_text(encoding="utf-8") + "```"

    return EXAMPLE.sub(block, page)


def main() -> None:
    quickstart = HERE / "quickstart.md"
    quickstart.write_text(with_examples(quickstart.read_text(encoding="utf-8")), encoding="utf-8")
    for (name, column), text in tables().items():
        before, rest = re.split(rf"^(?=\| {column} \|)", (HERE / name).read_text(), maxsplit=1, flags=re.MULTILINE)
        (HERE / name).write_text(before + text + re.sub(r"\A(\|.*\n)*", "", rest))


if __name__ == "__main__":
    main()
