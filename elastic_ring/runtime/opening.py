"""The start of a coordinator: it claims a term, reads the journal back, and makes room where it is the first.

After it the coordinator decides; what the end of a run writes is `ending`'s work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_ring.control.replay import standing
from elastic_ring.errors import CoordinatorLost, RunFailed
from elastic_ring.monitor.journal import claim_term, read
from elastic_ring.monitor.metrics import JOURNAL_NAME, SUMMARY_NAME
from elastic_ring.runtime.charter import Charter, set_aside

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Opening:
    """What a coordinator starts from: its `term`, how many lines it has read (`num_written`), and those of this attempt
    that stand, in order; none for the first coordinator of an attempt."""

    term: int
    num_written: int = 0
    lines: tuple[Line, ...] = ()

    @property
    def begin(self) -> Line | None:
        """The note with which this attempt began, written by its first coordinator."""
        return next((line for line in self.lines if line.get("note") == "begin"), None)


def open_run(
    charter: Charter, *, is_restart: bool, others: Callable[[], Sequence[str]], clear: Callable[[], Sequence[str]]
) -> Opening:
    """Claim a term, and go on with the journal of this attempt or make room for a first one.

    `is_restart`: in a process that Ray started again. `others()` names what exists of the run beside this coordinator;
    `clear()` removes that, and names what stays. Raises: as `refuse_to_begin`; RunFailed when something stays;
    JournalDamaged.
    """
    folder = charter.run.folder
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / JOURNAL_NAME
    term = claim_term(folder)  # before the journal is read: whoever spoke before writes nothing that counts
    written = list(read(path)) if path.exists() else []
    lines = standing(written)
    begins = [line for line in lines if line.get("note") == "begin"]
    if begins and begins[-1]["attempt"] == charter.attempt:
        return Opening(term, len(written), tuple(lines))
    refuse_to_begin(charter, begins, is_restart=is_restart, others=others)
    # What a coordinator left that is gone for good: it would hold the places that this run needs.
    left = clear()
    if left:
        raise RunFailed(f"an earlier attempt's actors do not go: {', '.join(left)}", run=charter.run.name)
    if lines:
        set_aside(folder)
    return Opening(term)


def refuse_to_begin(
    charter: Charter, begins: Sequence[Line], *, is_restart: bool, others: Callable[[], Sequence[str]]
) -> None:
    """Whether a first coordinator of `charter` may begin where the journal has these beginnings.

    Raises RunFailed when the run has finished. In a process that Ray started again: RunFailed when the folder is
    another submission's now, CoordinatorLost when workers of this run live whose journal is not to be seen from here.
    """
    run = charter.run
    if is_restart and begins and begins[-1]["now"] > charter.submitted_unix_s:
        raise RunFailed(f"another submission has taken {run.folder}: this one ends", run=run.name)
    if is_restart and others():
        raise CoordinatorLost(f"the run has workers, but its journal is not in {run.folder} on this node")
    if (run.folder / SUMMARY_NAME).exists():
        raise RunFailed(f"run {run.name} has finished: {run.folder} holds its summary")
