"""Terms: how a coordinator claims the right to decide for a run, and how it stops once another has a newer claim.

A claim is a file of the run's storage that only one process can create. It counts at once and is never deleted; a
withdrawal beside it alone voids it. The coordinator and the simulator run the same code; no storage and no clock here.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from elastic_ring.errors import StaleMessage, StorageFailed, TermLost

LOOK_S = 1.0
"""Between a coordinator's looks for a newer term: within this and one look's time it stops."""
LONGEST_TURN_S = 5.0
"""A process that was frozen counts at most so much of it as time in which it could not ask."""

Action = Literal["look", "read", "claim", "withdraw"]
"""Requests of `begin`: the newest claim that stands; reading the run's records, which raises if they refuse the start;
a claim of the term after those that were seen, None if somebody has it; a withdrawal of that claim."""


@dataclass(frozen=True)
class TermClaim:
    """Term `term` belongs to the submission `attempt` on `host`, by the claim `id`; all are empty where the file holds
    none. A process that was told of its term knows no `id`. `since`: when, for people."""

    term: int
    attempt: str = ""
    host: str = ""
    id: str = ""
    since: str = field(default="", compare=False)


NOBODY = TermClaim(0)


def newest_claim(claims: Iterable[TermClaim], withdrawn: Collection[int]) -> TermClaim:
    return max((claim for claim in claims if claim.term not in withdrawn), key=lambda claim: claim.term, default=NOBODY)


def refuse_if_replaced(
    run: str, place: str, own: TermClaim, newest: TermClaim, *, at_own: TermClaim | None = None
) -> None:
    """`at_own`: what the storage has for the own term now, NOBODY for nothing; None where nobody has looked.

    Raises: StaleMessage where another coordinator of the same submission has a newer term: it goes on with the members.
    TermLost where another submission has it, or the own claim is gone or somebody else's: this one stops.
    """
    if newest.term <= own.term:
        if at_own is None or (at_own.attempt == own.attempt and (not own.id or at_own.id == own.id)):
            return
        holder = f"is {at_own.host or 'somebody'}'s now{at_own.since}" if at_own.term else "was removed"
        raise TermLost(
            f"run {run} in {place} is not this submission's any more: its claim terms/{own.term:06d}"
            f"{f' ({own.host}{own.since})' if own.host else ''} {holder}, so another submission may have the run; this "
            "one stops here and writes nothing more; keep terms/ from what cleans the storage, and submit this command "
            "again",
            run=run,
            host=at_own.host,
            term=at_own.term,
            own_term=own.term,
        )
    if newest.attempt and newest.attempt == own.attempt:
        raise StaleMessage(f"a newer coordinator of this submission has term {newest.term}: this one exits")
    host = newest.host or f"somebody (terms/{newest.term:06d} names no host)"
    held = f"this submission had term {own.term}" if own.term else "this submission had begun before"
    raise TermLost(
        f"run {run} in {place} is not this submission's any more: {host} has claimed term {newest.term}{newest.since}, "
        f"{held}; it stops here and writes nothing more; to go on here instead, stop the run there and submit this "
        "command again",
        run=run,
        host=newest.host,
        term=newest.term,
        own_term=own.term,
    )


def begin(run: str, place: str, attempt: str, *, has_claimed: bool) -> Generator[Action, Any, TermClaim]:
    """Look, read, claim, read and look again: refuse a start before a term is claimed, if possible. Returns the claim.

    `has_claimed`: an earlier coordinator of this submission has claimed a term, which may have been replaced since.
    Raises, beside what the actions raise, as `refuse_if_replaced`; a claim whose owner is refused is withdrawn first.
    """
    own: TermClaim | None = None
    seen = 0 if has_claimed else None
    while own is None:  # a process may be frozen before its claim, which must not replace one that it has not seen
        newest: TermClaim = yield "look"
        if seen is not None and newest.attempt != attempt and newest.term > seen:
            refuse_if_replaced(run, place, TermClaim(0, attempt), newest)
        seen = newest.term if seen is None else seen
        yield "read"
        own = yield "claim"
    try:
        yield "read"
        refuse_if_replaced(run, place, own, (yield "look"))
    except StorageFailed:
        raise  # no refusal; a withdrawal could not be written either
    except Exception:
        yield "withdraw"
        raise
    return own


def is_late(attempt: str, writer: str, folder: str, began_with: Collection[str]) -> bool:
    """Whether a checkpoint in `folder`, of the submission `writer`, counts for nothing in the submission `attempt`: one
    that it has replaced may be frozen for any time between its last question and its manifest. `began_with`: the
    folders of those that counted when `attempt` began."""
    return writer != attempt and folder not in began_with


@dataclass
class Unanswered:
    """How long a process could neither write nor read terms, without the time for which it was frozen."""

    longest_turn_s: float = LONGEST_TURN_S
    silent_s: float = 0.0
    _at_s: float | None = None

    def tick(self, now: float, *, is_heard: bool) -> float:
        """`is_heard`: whether the storage has answered since the last call, none of which is later than its turn."""
        passed_s = 0.0 if self._at_s is None else min(now - self._at_s, self.longest_turn_s)
        self._at_s = now
        self.silent_s = 0.0 if is_heard else self.silent_s + passed_s
        return self.silent_s
