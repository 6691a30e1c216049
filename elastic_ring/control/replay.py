"""The journal as a proof: the same events through the same core must give the same commands. Reads no files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from elastic_ring.control.coordination import Decision, advance, initial
from elastic_ring.control.messages import Command, Event, from_json, to_json
from elastic_ring.control.options import ControlOptions
from elastic_ring.control.state import State
from elastic_ring.errors import ElasticRingError, JournalDamaged


def journal_line(event: Event, decision: Decision, now: float) -> dict[str, Any]:
    """What is written before any of the commands leaves. `term` is the writer's.

    An event that changed nothing (`decision.state` is the state before) need not be written.
    """
    return {
        "now": now,
        "term": decision.state.term,
        "event": to_json(event),
        "commands": packed(decision.commands),
        "reason": decision.reason,
    }


def packed(commands: Iterable[Command]) -> list[dict[str, Any]]:
    """Commands as JSON. What is told to many workers in a row stands once, with `workers` instead of `worker`: a
    `Build` names every seat, and a thousand of them would be a thousand times a thousand names."""
    lines: list[dict[str, Any]] = []
    last: tuple[type, dict[str, Any]] | None = None
    for command in commands:
        told = dict(vars(command))
        worker = told.pop("worker", None)
        if worker is None:
            lines.append(to_json(command))
            last = None
            continue
        if (type(command), told) == last:
            lines[-1]["workers"].append(worker)
        else:
            line = to_json(command)
            del line["worker"]
            lines.append({**line, "workers": [worker]})
        last = type(command), told
    return lines


def term_note(term: int, num_lines: int) -> dict[str, Any]:
    """What a coordinator of `term` writes first: how many lines it has read. See `standing`."""
    return {"note": "term", "term": term, "num_lines": num_lines}


def standing(lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The lines that count: without those which an older coordinator wrote behind the back of its successor.

    It may not know yet that it was replaced; its commands did not leave, because it looks before it sends.
    """
    kept: list[tuple[int, Mapping[str, Any]]] = []
    term = 0
    for number, line in enumerate(lines):
        if line.get("note") == "term":
            kept = [(at, known) for at, known in kept if at < line["num_lines"]]
            term = line["term"]
        if line.get("term", term) >= term:
            kept.append((number, line))
    return [line for _, line in kept]


def replay(options: ControlOptions, lines: Iterable[str | Mapping[str, Any]]) -> State:
    """The state after all lines. Lines are JSON texts or already read mappings.

    Lines of an older term than one before them are passed over: a coordinator that had been replaced, and did
    not know it yet, wrote them, and its commands did not leave. A last line that was cut off while it was
    written is passed over too, for the same reason.

    Raises: JournalDamaged at the first other line that cannot be read or whose commands differ.
    """
    state = initial(options)
    texts = list(lines)
    for number, text in enumerate(texts):
        try:
            line = json.loads(text) if isinstance(text, str) else text
            event, now, recorded = from_json(line["event"]), float(line["now"]), line["commands"]
        except (ValueError, KeyError, TypeError) as error:
            if number == len(texts) - 1 and isinstance(error, ValueError):
                break
            raise JournalDamaged(f"line {number + 1} cannot be read: {error}", line=number + 1) from error
        if line.get("term", state.term) < state.term:
            continue
        try:
            decision = advance(state, event, now)  # type: ignore[arg-type]
        except ElasticRingError as error:
            raise JournalDamaged(f"line {number + 1} has no place here: {error}", line=number + 1) from error
        given = packed(decision.commands)
        # Texts, not values: a NaN in a vote is unequal to itself.
        if json.dumps(given, sort_keys=True) != json.dumps(recorded, sort_keys=True):
            raise JournalDamaged(
                f"line {number + 1} records other commands than its event gives.\nrecorded: {recorded}\ngiven: {given}",
                line=number + 1,
            )
        state = decision.state
    return state
