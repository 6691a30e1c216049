"""The guards of each way to train ("door"), and why one is missing: the table of `docs/zero3.md` and of refusals.

A door without a guard refuses the guard's settings by name, with the reason from here. Pure: no torch, no Ray.
"""

from __future__ import annotations

from dataclasses import dataclass

RING, ZERO3, HUGGING_FACE, OWN_MODEL, RESUME, TUNER = DOORS = (
    "elastic ring",
    "ZeRO-3 in Ray Train",
    "Hugging Face model",
    "own model",
    "resume",
    "tuner",
)
NON_FINITE, MAX_SKIPPED, SPIKES, STRAGGLERS, CORRUPTION, SAMPLES, TOKENS, ATTENDS, MEMORY = GUARDS = (
    "a step that is not finite is skipped and reported",
    "`max_skipped` ends the run",
    "loss spikes",
    "stragglers",
    "wrong results (`corruption`)",
    "digest of the samples",
    "tokenizer and vocabulary",
    "the model attends to the whole sequence",
    "reliefs when memory runs out",
)

SETTINGS = {
    MAX_SKIPPED: ("max_skipped",),
    SPIKES: ("loss_spike", "loss_spike_actions"),
    STRAGGLERS: ("straggler", "straggler_factor", "straggler_window_s"),
    CORRUPTION: ("corruption", "corruption_every_steps"),
    SAMPLES: ("samples_sha256",),
    TOKENS: ("tokenizer",),
    ATTENDS: ("check_model",),
    MEMORY: ("memory_limit", "memory_pressure", "memory_pressure_share", "memory_relax_steps"),
}
"""The settings that turn each guard on."""


@dataclass(frozen=True)
class Cell:
    """How a door has a guard; `why_not`: why it has not, as the end of an error."""

    does: str = "yes"
    why_not: str = ""


_ONE_DEVICE = "a trial trains briefly on one device and rank; the run with the pattern is guarded"

_OTHERS = {
    (ZERO3, SPIKES): Cell("yes, without `back`"),
    (ZERO3, STRAGGLERS): Cell(
        why_not="in each layer all workers wait for each other, so no worker's own time shows, and Ray Train has no "
        "spare to take a place"
    ),
    (ZERO3, CORRUPTION): Cell(
        why_not="one copy of each shard is kept over all workers, so nobody has a second result to compare"
    ),
    (ZERO3, MEMORY): Cell(
        why_not="a worker group starts anew with the same settings; give --offload-optimizer, --offload-param or a "
        "larger cp"
    ),
    (HUGGING_FACE, TOKENS): Cell("yes, and its tokenizer"),
    (HUGGING_FACE, ATTENDS): Cell("yes, and each layer's calls"),
    (RESUME, MAX_SKIPPED): Cell("yes, the count goes on"),
    (RESUME, SPIKES): Cell("yes, after 32 new losses"),
    (RESUME, ATTENDS): Cell("at step 0; another model is another run"),
    (TUNER, NON_FINITE): Cell("yes; what diverges is rejected"),
    (TUNER, MAX_SKIPPED): Cell("rejects the pattern"),
    (TUNER, SPIKES): Cell(why_not=_ONE_DEVICE),
    (TUNER, STRAGGLERS): Cell(why_not=_ONE_DEVICE),
    (TUNER, CORRUPTION): Cell(why_not=_ONE_DEVICE),
    (TUNER, SAMPLES): Cell(why_not=_ONE_DEVICE),
    (TUNER, ATTENDS): Cell(why_not=_ONE_DEVICE),
    (TUNER, MEMORY): Cell(why_not="a pattern that does not fit the device's memory is rejected"),
}


def cell(door: str, guard: str) -> Cell:
    return _OTHERS.get((door, guard), Cell())


def reason(door: str, setting: str) -> str:
    """Why a door lacks the guard of this setting; empty if it has it, and for settings of no guard."""
    for guard, names in SETTINGS.items():
        if setting in names:
            return cell(door, guard).why_not
    return ""


def table() -> str:
    """As Markdown, with the reasons below."""
    notes: list[str] = []
    lines = [f"| | {' | '.join(DOORS)} |", f"|---|{'---|' * len(DOORS)}"]
    for guard in GUARDS:
        shown = []
        for door in DOORS:
            entry = cell(door, guard)
            if entry.why_not and entry.why_not not in notes:
                notes.append(entry.why_not)
            shown.append(f"no ({notes.index(entry.why_not) + 1})" if entry.why_not else entry.does)
        lines.append(f"| {guard} | {' | '.join(shown)} |")
    return "\n".join([*lines, "", *(f"{number}. {note}" for number, note in enumerate(notes, start=1))])
