"""Journal lines and their replay: the same events must give the same commands again. Reads no files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from textwrap import shorten
from typing import Any, TypeVar

from elastic_ring.control.coordination import Decision, advance, initial
from elastic_ring.control.facts import Fact, fact_of, line_of
from elastic_ring.control.messages import Command, Event, from_json, to_json
from elastic_ring.control.options import ControlOptions
from elastic_ring.control.state import State
from elastic_ring.errors import ElasticRingError, JournalDamaged

JournalLine = TypeVar("JournalLine", bound=Mapping[str, Any])
MAX_COMMAND_CHARS = 200
"""Characters of a command in an error."""


def journal_line(event: Event | Fact, decision: Decision, now: float) -> dict[str, Any]:
    """The journal line of one event, written before its commands are sent. `term` is the writer's.

    An event that changed nothing (`decision.state` is the state before) need not be written; a fact must be.
    """
    if isinstance(event, Fact):
        return line_of(event)
    return {
        "now": now,
        "term": decision.state.term,
        "event": to_json(event),
        "commands": packed(decision.commands),
        "reason": decision.reason,
    }


def packed(commands: Iterable[Command]) -> list[dict[str, Any]]:
    """Commands as JSON. Equal commands to consecutive workers become one, with `workers` instead of `worker`.

    A `Build` lists all members, so n copies of it would have n * n names.
    """
    lines: list[dict[str, Any]] = []
    last: object = None
    for command in commands:
        fields = dict(vars(command))  # to JSON only once for thousands of equal commands
        worker = fields.pop("worker", None)
        if worker is not None and (type(command), fields) == last:
            lines[-1]["workers"].append(worker)
            continue
        line = to_json(command)
        if worker is not None:
            del line["worker"]
            line["workers"] = [worker]
        lines.append(line)
        last = (type(command), fields) if worker is not None else None
    return lines


def term_note(term: int, num_lines: int) -> dict[str, Any]:
    """The first line of a coordinator of `term`, with the number of lines that it has read. See `standing`."""
    return {"note": "term", "term": term, "num_lines": num_lines}


def standing(lines: Iterable[JournalLine]) -> list[JournalLine]:
    """The lines that count: lines that a replaced coordinator wrote after its successor had read the journal do not.

    It sent no commands for them, because it checks for a newer term before it sends.
    """
    kept: list[tuple[int, JournalLine]] = []
    term = 0
    for number, line in enumerate(lines):
        if line.get("note") == "term":
            kept = [(place, earlier) for place, earlier in kept if place < line["num_lines"]]
            term = line["term"]
        if line.get("term", term) >= term:
            kept.append((number, line))
    return [line for _, line in kept]


def replay(
    options: ControlOptions,
    lines: Iterable[str | Mapping[str, Any]],
    show: Callable[[Event | Fact, Sequence[Command]], None] = lambda event, commands: None,
) -> State:
    """The state after all lines, which are JSON texts or parsed mappings. `show` gets each event with its commands.

    Skipped, because no commands were sent for them: lines of an older term than one before them, which a replaced
    coordinator wrote, and an incomplete last line. Also notes that are no facts.

    Raises: JournalDamaged at the first other line that cannot be read or whose commands differ.
    """
    state, now = initial(options), 0.0
    entries = list(lines)
    for number, entry in enumerate(entries, 1):
        event: Any
        try:
            line = json.loads(entry) if isinstance(entry, str) else entry
            if "note" in line:
                event, recorded = fact_of(line), []
            else:
                event, now, recorded = from_json(line["event"]), float(line["now"]), line["commands"]
        except (ValueError, KeyError, TypeError) as error:
            if number == len(entries) and isinstance(error, ValueError):
                break
            raise JournalDamaged(f"line {number} cannot be read: {error}", line=number) from error
        if event is None or line.get("term", state.term) < state.term:
            continue
        try:
            decision = advance(state, event, now)
        except ElasticRingError as error:
            raise JournalDamaged(f"line {number} has no place here: {error}", line=number) from error
        commands = packed(decision.commands)
        # Compare texts: a NaN in a vote is unequal to itself.
        if json.dumps(commands, sort_keys=True) != json.dumps(recorded, sort_keys=True):
            wrong = next((pair for pair in zip_longest(recorded, commands) if pair[0] != pair[1]), (recorded, commands))
            texts = [shorten(str(command), MAX_COMMAND_CHARS, placeholder="...") for command in wrong]
            raise JournalDamaged(
                f"line {number} records other commands than its event gives: {texts[0]}, not {texts[1]}; was it "
                "written by another version?",
                line=number,
            )
        state = decision.state
        show(event, decision.commands)
    return state
