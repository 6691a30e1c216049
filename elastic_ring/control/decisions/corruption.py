"""Which rank computed wrongly. Pure: no clock, no torch, no I/O.

Ranks that must agree send digests in the step's vote. Every rank judges the same table, so all reach the same result
before they apply anything. Replicas of a shard must hold the same state and the same reduced gradient. A wrong local
gradient spoils all replicas alike, so each ring recomputes one sequence of the ring before it.

Of three or more replicas the minority is wrong. Two cannot name one: the step runs again on the same ranks, and each
rank repeats its first digests. If they agree now, the rank whose two digests differ was wrong. If not, a spare replaces
one suspect after the other until the ranks agree (`replacements`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_ring.mesh import Mesh

STATE, REDUCED, LOCAL = "state", "reduced gradient", "local gradient"
WHATS = ("", STATE, REDUCED, LOCAL)
"""What may differ, by its number in the vote."""


@dataclass(frozen=True)
class Digests:
    """What one rank reports of one attempt at a step: numbers that float64 holds exactly, 0 where it reports nothing.

    `state`: of parameters and optimizer before the step. `reduced`: of the gradient, summed over the rings; `norm_sq`:
    its squared norm. `own`: of the gradient of the first sequence of its ring alone, not summed over the rings.
    `again`: the same of the ring before its own, which its ring computed again.
    """

    state: float = 0.0
    reduced: float = 0.0
    norm_sq: float = 0.0
    own: float = 0.0
    again: float = 0.0

    @property
    def of_gradient(self) -> tuple[float, float]:
        return self.reduced, self.norm_sq if self.norm_sq == self.norm_sq else -1.0

    def numbers(self) -> tuple[float, ...]:
        return self.state, self.reduced, self.norm_sq, self.own, self.again


@dataclass(frozen=True)
class Suspicion:
    """An attempt at `step` on `mesh` in which `what` differed and nobody could be named. `told`: this rank's report."""

    step: int
    mesh: Mesh
    what: str
    told: Digests


@dataclass(frozen=True)
class Finding:
    """`what` differed. `ranks`: who computed wrongly; empty if nobody can be named. `differs`: who does not agree with
    whom. `is_over`: the ranks agree now; it was so in the attempt before."""

    what: str
    ranks: tuple[int, ...]
    differs: tuple[int, ...]
    is_over: bool = False

    def told(self, step: int) -> str:
        before = "agrees in a second attempt, but differs from the first" if self.is_over else "differs"
        text = f"step {step}: the {self.what} of ranks {_listed(self.differs)} {before}"
        if self.ranks:
            return f"{text}; wrong is rank {_listed(self.ranks)}, whose processor or memory is faulty"
        return f"{text}; nobody can be named"


def judge(now: Sequence[Digests], before: Sequence[Digests | None], what_before: str, mesh: Mesh) -> Finding | None:
    """What the table of one vote shows. `before`: each rank's report of the attempt before, if `what_before` differed
    there and nobody was named."""
    for what, values in ((STATE, [each.state for each in now]), (REDUCED, [each.of_gradient for each in now])):
        found = _replicas(what, values, mesh)
        if found is not None:
            return found
    found = _rings(now, mesh)
    return found if found is not None else _second_try(now, before, what_before, mesh)


def _replicas(what: str, values: Sequence[object], mesh: Mesh) -> Finding | None:
    """Replicas of a shard that do not agree; named by majority."""
    wrong: list[int] = []
    differs: list[int] = []
    is_named = True
    for cp_rank in range(mesh.cp):
        ranks = mesh.replicas(cp_rank)
        counts = Counter(values[rank] for rank in ranks)
        if len(counts) == 1:
            continue
        (most, number), *_ = counts.most_common(1)
        is_named &= 2 * number > len(ranks)
        wrong += [rank for rank in ranks if values[rank] != most]
        differs += ranks
    if not differs:
        return None
    return Finding(what, tuple(sorted(wrong)) if is_named else (), tuple(sorted(differs)))


def _rings(now: Sequence[Digests], mesh: Mesh) -> Finding | None:
    """Rings that do not agree on a sequence that both computed. A ring that agrees neither with the one that checks it
    nor with the one that it checks is the wrong one, if those two agree with the rest."""
    bad: list[tuple[int, int, int]] = []  # cp_rank, ring, the ring that checks it
    for ring in range(mesh.dp):
        checker = (ring + 1) % mesh.dp
        for mine, its in zip(mesh.ring(ring), mesh.ring(checker), strict=True):
            if now[mine].own and now[its].again and now[mine].own != now[its].again:
                bad.append((mesh.coordinate(mine).cp_rank, ring, checker))
    if not bad:
        return None
    involved = Counter(ring for pair in {(ring, checker) for _, ring, checker in bad} for ring in pair)
    twice = [ring for ring, number in involved.items() if number == 2]
    cp_ranks = {cp_rank for cp_rank, *_ in bad}
    differs = tuple(sorted(mesh.ring(ring)[cp_rank] for ring in involved for cp_rank in cp_ranks))
    is_named = mesh.dp >= 3 and len(twice) == 1 and len(cp_ranks) == 1
    named = tuple(mesh.ring(twice[0])[cp_rank] for cp_rank in cp_ranks) if is_named else ()
    return Finding(LOCAL, named, differs)


def _second_try(
    now: Sequence[Digests], before: Sequence[Digests | None], what_before: str, mesh: Mesh
) -> Finding | None:
    """All agree now: whose digests are not those of its first try? A fault before FSDP2's sum reaches all ranks of a
    ring: that names the ring only."""
    changed = []
    for rank, (second, first) in enumerate(zip(now, before, strict=True)):
        if first is None:
            continue
        fields = {STATE: ("state",), REDUCED: ("of_gradient",), LOCAL: ("own", "again")}[what_before]
        if any(getattr(first, name) != getattr(second, name) for name in fields):
            changed.append(rank)
    if not changed:
        return None
    # A newcomer in a ring has no first try: what changed in that ring may be its predecessor's fault.
    new = {mesh.coordinate(rank).dp_rank for rank, first in enumerate(before) if first is None}
    is_hidden = what_before == LOCAL and any(mesh.coordinate(rank).dp_rank in new for rank in changed)
    is_named = (len(changed) == 1 and not is_hidden) or what_before == REDUCED
    return Finding(what_before, tuple(changed) if is_named else (), tuple(changed), is_over=True)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def is_checked(step: int, every_steps: int) -> bool:
    """Whether ranks send digests in this step's vote and recompute a sequence."""
    return every_steps > 0 and (step + 1) % every_steps == 0
