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
QUANTITIES = ("", STATE, REDUCED, LOCAL)
"""Quantities that may differ, by their number in the vote."""


@dataclass(frozen=True)
class Digests:
    """One rank's digests of one attempt at a step: numbers that float64 holds exactly, 0 where it reports none.

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
    """An attempt at `step` on `mesh` in which `quantity` differed and no rank was named. `digests`: of this rank."""

    step: int
    mesh: Mesh
    quantity: str
    digests: Digests


@dataclass(frozen=True)
class Finding:
    """`quantity` differed. `ranks`: those that computed wrongly; empty if unknown. `differs`: ranks that do not
    agree. `is_over`: the ranks agree now; they differed in the attempt before."""

    quantity: str
    ranks: tuple[int, ...]
    differs: tuple[int, ...]
    is_over: bool = False

    def describe(self, step: int) -> str:
        before = "agrees in a second attempt, but differs from the first" if self.is_over else "differs"
        text = f"step {step}: the {self.quantity} of ranks {_listed(self.differs)} {before}"
        if self.ranks:
            return f"{text}; wrong is rank {_listed(self.ranks)}, whose processor or memory is faulty"
        return f"{text}; nobody can be named"


def judge(now: Sequence[Digests], before: Sequence[Digests | None], differed: str, mesh: Mesh) -> Finding | None:
    """The finding in the table of one vote. `before`: each rank's report of the attempt before, if the quantity
    `differed` did so there and no rank was named."""
    for quantity, values in ((STATE, [each.state for each in now]), (REDUCED, [each.of_gradient for each in now])):
        finding = _compare_replicas(quantity, values, mesh)
        if finding is not None:
            return finding
    return _compare_rings(now, mesh) or _compare_attempts(now, before, differed, mesh)


def _compare_replicas(quantity: str, values: Sequence[object], mesh: Mesh) -> Finding | None:
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
    return Finding(quantity, tuple(sorted(wrong)) if is_named else (), tuple(sorted(differs)))


def _compare_rings(now: Sequence[Digests], mesh: Mesh) -> Finding | None:
    """Rings that disagree on a sequence that both computed. A ring that disagrees with its checker and with the ring it
    checks is wrong, if these two agree with the rest."""
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


def _compare_attempts(
    now: Sequence[Digests], before: Sequence[Digests | None], differed: str, mesh: Mesh
) -> Finding | None:
    """Where all agree now, the ranks whose digests differ from those of their first attempt. A fault before FSDP2's sum
    reaches all ranks of a ring: that names the ring only."""
    changed = []
    for rank, (second, first) in enumerate(zip(now, before, strict=True)):
        if first is None:
            continue
        fields = {STATE: ("state",), REDUCED: ("of_gradient",), LOCAL: ("own", "again")}[differed]
        if any(getattr(first, name) != getattr(second, name) for name in fields):
            changed.append(rank)
    if not changed:
        return None
    # A newcomer in a ring has no first attempt: a change in that ring may be its predecessor's fault.
    new = {mesh.coordinate(rank).dp_rank for rank, first in enumerate(before) if first is None}
    is_hidden = differed == LOCAL and any(mesh.coordinate(rank).dp_rank in new for rank in changed)
    is_named = (len(changed) == 1 and not is_hidden) or differed == REDUCED
    return Finding(differed, tuple(changed) if is_named else (), tuple(changed), is_over=True)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def is_checked(step: int, every_steps: int) -> bool:
    """Whether ranks send digests in this step's vote and recompute a sequence."""
    return every_steps > 0 and (step + 1) % every_steps == 0
