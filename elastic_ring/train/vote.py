"""The vote: one small all-gather before the optimizer, and its result.

Each rank contributes one row; every rank reduces the same table in rank order, so all get the same bits. The vote
completes on one rank only if every rank entered it, which makes the step a transaction.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from enum import IntFlag, auto
from functools import cached_property, reduce
from operator import add, or_
from typing import Any

import torch

from elastic_ring.control.decisions.corruption import LOCAL, STATE, WHATS, Digests, Finding, judge
from elastic_ring.control.decisions.loss_spikes import CLIP_SHARE, VERDICTS, SpikeBallot
from elastic_ring.control.messages import Vote
from elastic_ring.data.loader import samples_text
from elastic_ring.errors import ElasticRingError
from elastic_ring.mesh import Mesh
from elastic_ring.monitor.metrics import StepMetrics


class Flag(IntFlag):
    """What a rank says; of a vote, what any rank said."""

    BOUNDARY = auto()  # the step is to be followed by a boundary
    DUE = auto()  # a checkpoint is; only global rank 0 knows
    BUSY = auto()  # it still writes the last checkpoint
    COPYING = auto()  # the last copies in peers' memory are not complete, or there is no memory for the next
    COPY_FAILED = auto()  # its part of the last copies was not completed


NOTHING = Flag(0)


@dataclass(frozen=True)
class Tally:
    """What a vote comes to, and one rank's share of it: its sums run over its own slices. `samples`: the limbs of the
    consumed digest. `spike`: what is known of the losses before; of a vote, what the rank says that has seen most."""

    grad_norm_sq: float = 0.0
    num_nonfinite: float = 0.0
    loss_sum: float = 0.0
    num_tokens: float = 0.0
    samples: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    flags: Flag = NOTHING
    spike: SpikeBallot = field(default_factory=SpikeBallot)

    def numbers(self) -> tuple[float, ...]:
        sums = self.grad_norm_sq, self.num_nonfinite, self.loss_sum, self.num_tokens, *self.samples
        return tuple(map(float, (*sums, self.flags, *astuple(self.spike))))

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Tally:
        norm_sq, num_nonfinite, loss_sum, num_tokens, *samples, flags, num_seen, limit, verdict, clips_harder = numbers
        spike = SpikeBallot(int(num_seen), limit, int(verdict), clips_harder > 0)
        return cls(norm_sq, num_nonfinite, loss_sum, num_tokens, tuple(samples), Flag(int(flags)), spike)


class ComputedWrongly(ElasticRingError):
    """Ranks that must agree do not. Facts: `what` differs, and the `ranks` that computed wrongly, none if the step must
    run again to tell; `differs` are those that do not agree with each other."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.facts.get("ranks", ()))

    @property
    def differs(self) -> tuple[int, ...]:
        return tuple(self.facts.get("differs", ()))


class MustGoBack(ElasticRingError):
    """The loss rose, or steps were skipped: all members must restore a state from before `first_step` and skip the
    batches up to `step`'s (both are facts)."""


class ReplicasDiverged(ElasticRingError):
    """Replicas of a shard computed different gradient norms: a host's memory or processor is faulty."""


@dataclass(frozen=True)
class Ballot:
    """One rank's row.

    `work_s`: how long it worked itself for each of its sequences, without waits for others, in seconds; 0 if not
    measured. `memory_share`: how near it came to the end of its memory (`MemoryGauge`). `digests`: what it computed.
    `first`: the same of its attempt at this step before, if ranks did not agree in it: in `what`. `expert_load`: the
    largest load of an expert by its fair share (`LoadMeter`); 0 without experts.
    """

    tally: Tally
    work_s: float = 0.0
    memory_share: float = 0.0
    digests: Digests = field(default_factory=Digests)
    what: str = ""
    first: Digests = field(default_factory=Digests)
    expert_load: float = 0.0

    def row(self) -> torch.Tensor:
        digests = *self.digests.numbers(), WHATS.index(self.what), *self.first.numbers()
        own = self.work_s, self.memory_share, *digests, self.expert_load
        return torch.tensor([*self.tally.numbers(), *own], dtype=torch.float64)

    @classmethod
    def of(cls, row: Sequence[float]) -> Ballot:
        work_s, memory_share, *told, expert_load = row[_NUM_TALLIED:]
        first = WHATS[int(told[5])], Digests(*told[6:])
        return cls(Tally.of(row[:_NUM_TALLIED]), work_s, memory_share, Digests(*told[:5]), *first, expert_load)


_NUM_TALLIED = len(Tally().numbers())
_NUM_NUMBERS = len(Ballot(Tally()).row())


@dataclass(frozen=True)
class Outcome:
    """The result of a vote. Gradients are of the summed loss; `grad_norm` is of the mean loss.

    `work_s` and `memory_shares`: each rank's, as in `Ballot`; empty where the result came later, from another rank.
    `expert_load`: the largest of all rings; 0 then, too.
    `finding`: which rank computed wrongly, if the run only reports it.
    """

    vote: Vote
    work_s: tuple[float, ...] = ()
    finding: Finding | None = None
    memory_shares: tuple[float, ...] = ()
    expert_load: float = 0.0

    @cached_property
    def tally(self) -> Tally:
        return Tally.of(self.vote.values)

    @property
    def num_tokens(self) -> float:
        return self.tally.num_tokens

    @property
    def loss(self) -> float:
        return self.tally.loss_sum / self.num_tokens if self.num_tokens else 0.0

    @property
    def grad_norm(self) -> float:
        norm_sq = self.tally.grad_norm_sq
        return math.sqrt(norm_sq) / max(1.0, self.num_tokens) if norm_sq >= 0 else math.nan

    @property
    def skip(self) -> bool:
        """Whether the step changes nothing: its gradient or loss is not finite, or a loss spike is not trained on."""
        return not self.is_finite or self.spike in ("skip", "stop", "back")

    @property
    def is_finite(self) -> bool:
        """Whether both the gradient and the loss are."""
        return self.tally.num_nonfinite == 0 and math.isfinite(self.grad_norm) and math.isfinite(self.loss)

    @property
    def spike(self) -> str:
        """What follows if the loss is a spike, one of `loss_spikes.VERDICTS`; empty if it is none."""
        is_one = self.is_finite and 0 < self.spike_limit < self.loss
        return VERDICTS[self.tally.spike.verdict] if is_one else ""

    @property
    def spike_limit(self) -> float:
        """The loss above which this step's is a spike; 0 where that is not known."""
        return self.tally.spike.limit

    @property
    def clips_harder(self) -> bool:
        """Whether the gradient is clipped at `CLIP_SHARE` of the usual bound, for this step's spike or a recent one."""
        return self.spike == "clip" or self.tally.spike.clips_harder

    def metrics(self, lr: float, step_s: float, mesh: Mesh, generation: int) -> StepMetrics:
        """The metrics that follow from the vote, of a step that is committed now and took `step_s`."""
        return StepMetrics(
            step=self.vote.step,
            loss=self.loss,
            grad_norm=self.grad_norm,
            lr=lr,
            num_tokens=int(self.num_tokens),
            tokens_per_s=self.num_tokens / max(step_s, 1e-9),
            step_s=step_s,
            skipped=self.skip,
            generation=generation,
            mesh=mesh,
            num_members=mesh.size,
            samples=samples_text(self.samples),
            committed_monotonic_s=time.monotonic(),
        )

    @property
    def boundary(self) -> bool:
        return Flag.BOUNDARY in self.tally.flags

    @property
    def checkpoint(self) -> bool:
        """Whether every rank saves its state after this step."""
        return Flag.DUE in self.tally.flags and Flag.BUSY not in self.tally.flags

    @property
    def checkpoint_missed(self) -> bool:
        """Whether one was due, but some rank still writes the last."""
        return Flag.DUE | Flag.BUSY in self.tally.flags

    @property
    def copying(self) -> bool:
        """Whether some rank still sends or receives the last copies."""
        return Flag.COPYING in self.tally.flags

    @property
    def copies_failed(self) -> bool:
        """Whether some rank's part of the last copies was not completed."""
        return Flag.COPY_FAILED in self.tally.flags

    @property
    def samples(self) -> tuple[float, ...]:
        return self.tally.samples

    def scale(self, clip_norm: float | None) -> float:
        """The factor for the summed gradient: mean over tokens, times clipping."""
        mean = 1.0 / max(1.0, self.num_tokens)
        if clip_norm is not None and self.clips_harder:
            clip_norm *= CLIP_SHARE
        if clip_norm is None or self.grad_norm <= clip_norm:
            return mean
        return mean * clip_norm / self.grad_norm


def start_vote(group: Any, ballot: Ballot) -> tuple[Any, list[torch.Tensor]]:
    """Enter the vote; returns (work, rows), valid once the work is done."""
    rows = [torch.empty(_NUM_NUMBERS, dtype=torch.float64) for _ in range(group.size())]
    return group.allgather([rows], [ballot.row()]), rows


def count(
    step: int, rows: list[torch.Tensor], mesh: Mesh, membership_id: tuple[int, int], corruption: str = "off"
) -> Outcome:
    """Reduce the table in rank order; `membership_id` is the (term, generation) of the voters.

    Raises ReplicasDiverged when replicas of a shard disagree, and with corruption "act" ComputedWrongly if a
    replacement or a second try may mend it.
    """
    ballots = [Ballot.of(row.tolist()) for row in rows]
    finding = _look_for_wrong(step, ballots, mesh, corruption)
    _check_replicas(step, ballots, mesh)
    if finding is not None and finding.what != LOCAL and not finding.is_over:
        raise ReplicasDiverged(finding.told(step), step=step)
    shares = [ballot.tally for ballot in ballots]
    total = Tally(
        # Every ring has the same reduced gradient, so its norm is counted in the first ring only.
        _sum(shares[rank].grad_norm_sq for rank in mesh.ring(0)),
        _sum(one.num_nonfinite for one in shares),
        _sum(one.loss_sum for one in shares),
        _sum(one.num_tokens for one in shares),
        tuple(_sum(limbs) for limbs in zip(*(one.samples for one in shares), strict=True)),
        reduce(or_, (one.flags for one in shares)),
        max(shares, key=lambda one: one.spike.num_seen).spike,
    )
    work_s, memory = (tuple(getattr(one, name) for one in ballots) for name in ("work_s", "memory_share"))
    vote, load = Vote(step, total.numbers(), membership_id), max(one.expert_load for one in ballots)
    return Outcome(vote, work_s, finding, memory, load)


def _sum(values: Iterable[float]) -> float:
    """In this order; later Pythons' `sum` rounds otherwise."""
    return reduce(add, values, 0.0)


def _look_for_wrong(step: int, ballots: list[Ballot], mesh: Mesh, corruption: str) -> Finding | None:
    """A finding that the run only reports; raises for every other one."""
    if corruption == "off":
        return None
    first = [ballot.first if ballot.what else None for ballot in ballots]
    what = max((ballot.what for ballot in ballots), key=WHATS.index)
    finding = judge([ballot.digests for ballot in ballots], first, what, mesh)
    if finding is None or corruption == "log":
        return finding
    if what and finding.what == STATE and not finding.ranks and not finding.is_over:
        raise ReplicasDiverged(
            f"{finding.told(step)}, in two attempts, and a spare would get one of the two. Nothing of the step was "
            "applied: go on from a checkpoint, on other machines, or with three rings, which show who is wrong",
            step=step,
        )
    if finding.ranks or not finding.is_over:
        raise ComputedWrongly(
            finding.told(step), step=step, ranks=finding.ranks, what=finding.what, differs=finding.differs
        )
    return finding


def _check_replicas(step: int, ballots: list[Ballot], mesh: Mesh) -> None:
    for cp_rank in range(mesh.cp):
        norms = [ballots[rank].tally.grad_norm_sq for rank in mesh.replicas(cp_rank)]
        if any(norm != norms[0] and not (math.isnan(norm) and math.isnan(norms[0])) for norm in norms):
            ranks = mesh.replicas(cp_rank)
            shown = ", ".join(f"rank {rank}: {norm!r}" for rank, norm in zip(ranks, norms, strict=True))
            raise ReplicasDiverged(
                f"step {step}: the replicas of cp_rank {cp_rank} hold different gradients ({shown}); one of these "
                "hosts has a faulty processor or memory",
                step=step,
                cp_rank=cp_rank,
            )
