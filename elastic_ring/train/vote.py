"""The vote: one small all-gather before the optimizer, and its result.

Each rank contributes one row; every rank reduces the same table in rank order, so all get the same bits. The vote
completes on one rank only if every rank entered it, which makes the step a transaction. Skipped steps are reported, and
end the run, here too; `guard_table` lists the guards of each way to train.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field
from enum import IntFlag, auto
from functools import cached_property, reduce
from operator import add, or_
from typing import Any

import torch

from elastic_ring.control.decisions.corruption import LOCAL, QUANTITIES, STATE, Digests, Finding, judge
from elastic_ring.control.decisions.loss_spikes import CLIP_SHARE, VERDICTS, WINDOW, Action, SpikeBallot, SpikeWatch
from elastic_ring.control.messages import Vote
from elastic_ring.data.loader import samples_text
from elastic_ring.errors import ElasticRingError, LossSpike, TooManySkipped
from elastic_ring.mesh import Mesh
from elastic_ring.monitor.metrics import StepMetrics

NUM_NAMED = 20


class Flag(IntFlag):
    """Requests of one rank; in a vote's result the union of all ranks'."""

    BOUNDARY = auto()  # the step is to be followed by a boundary
    DUE = auto()  # a checkpoint is; only global rank 0 knows
    BUSY = auto()  # it still writes the last checkpoint
    COPYING = auto()  # the last copies in peers' memory are not complete, or there is no memory for the next
    COPY_FAILED = auto()  # its part of the last copies was not completed


NOTHING = Flag(0)


@dataclass(frozen=True)
class Tally:
    """The sums of a vote, or one rank's share of them, over its own slices. `samples`: the limbs of the consumed
    digest. `spike`: the verdict on earlier losses; in a vote's result it comes from the rank with the longest loss
    history."""

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
    """Digests differ between ranks that must agree. Facts: `what` differs, the `ranks` that computed wrongly (none: the
    step must run again to identify them), and the ranks of which `differs`."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.facts.get("ranks", ()))

    @property
    def differs(self) -> tuple[int, ...]:
        return tuple(self.facts.get("differs", ()))


class MustGoBack(ElasticRingError):
    """After a loss spike or skipped steps: all members must restore a state from before `first_step` and skip the
    batches up to `step`'s (both are facts)."""


class ReplicasDiverged(ElasticRingError):
    """Replicas of a shard computed different gradient norms: a host's memory or processor is faulty."""


@dataclass(frozen=True)
class Ballot:
    """One rank's row.

    `work_s`: own work per sequence, without waits for other ranks, in seconds; 0 if not measured. `memory_share`: used
    share of memory (`MemoryGauge`). `digests`: of its results. `first`: the digests of its attempt at this step before,
    if ranks did not agree there on `differing`. `expert_load`: the largest load of an expert by its fair share
    (`LoadMeter`); 0 without experts.
    """

    tally: Tally
    work_s: float = 0.0
    memory_share: float = 0.0
    digests: Digests = field(default_factory=Digests)
    differing: str = ""
    first: Digests = field(default_factory=Digests)
    expert_load: float = 0.0

    def row(self) -> torch.Tensor:
        digests = *self.digests.numbers(), QUANTITIES.index(self.differing), *self.first.numbers()
        own = self.work_s, self.memory_share, *digests, self.expert_load
        return torch.tensor([*self.tally.numbers(), *own], dtype=torch.float64)

    @classmethod
    def of(cls, row: Sequence[float]) -> Ballot:
        work_s, memory_share, *rest, expert_load = row[_NUM_TALLIED:]
        digests, differing, first = Digests(*rest[:5]), QUANTITIES[int(rest[5])], Digests(*rest[6:])
        return cls(Tally.of(row[:_NUM_TALLIED]), work_s, memory_share, digests, differing, first, expert_load)


_NUM_TALLIED = len(Tally().numbers())
_NUM_NUMBERS = len(Ballot(Tally()).row())


@dataclass(frozen=True)
class Outcome:
    """The result of a vote. Gradients are of the summed loss; `grad_norm` is of the mean loss.

    `work_s` and `memory_shares`: each rank's, as in `Ballot`; empty where the result came later, from another rank.
    `expert_load`: the largest of all rings; 0 then, too. `finding`: the rank that computed wrongly, if it is only
    reported.
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
        """The mean over the tokens; nan of a step without one counted target, which is skipped for it."""
        return self.tally.loss_sum / self.num_tokens if self.num_tokens else math.nan

    @property
    def grad_norm(self) -> float:
        norm_sq = self.tally.grad_norm_sq
        return math.sqrt(norm_sq) / max(1.0, self.num_tokens) if norm_sq >= 0 else math.nan

    @property
    def skip(self) -> bool:
        """Whether the step changes nothing: its gradient or loss is not finite, or a loss spike is not trained on."""
        return not self.is_finite or self.spike in ("skip", "stop", "back")

    def skips_in_a_row(self, before: int) -> int:
        """With this step. One without a target says nothing of training that diverges: it neither adds nor ends any."""
        return before if not self.num_tokens else before + 1 if self.skip else 0

    @property
    def is_finite(self) -> bool:
        """Whether both the gradient and the loss are."""
        return self.tally.num_nonfinite == 0 and math.isfinite(self.grad_norm) and math.isfinite(self.loss)

    @property
    def spike(self) -> str:
        """The response to a loss spike, one of `loss_spikes.VERDICTS`; empty without a spike."""
        is_spike = self.is_finite and 0 < self.spike_limit < self.loss
        return VERDICTS[self.tally.spike.verdict] if is_spike else ""

    @property
    def spike_limit(self) -> float:
        """The loss above which this step's is a spike; 0 if unknown."""
        return self.tally.spike.limit

    @property
    def clips_harder(self) -> bool:
        """Whether the gradient is clipped at `CLIP_SHARE` of the usual bound, for this step's spike or a recent one."""
        return self.spike == "clip" or self.tally.spike.clips_harder

    def metrics(self, lr: float, step_s: float, mesh: Mesh, generation: int) -> StepMetrics:
        """The metrics of a step that is committed now and took `step_s`."""
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

    Raises ReplicasDiverged when replicas of a shard disagree, and with corruption "act" ComputedWrongly if replacing a
    rank or a second attempt may help.
    """
    ballots = [Ballot.of(row.tolist()) for row in rows]
    finding = _find_corruption(step, ballots, mesh, corruption)
    for cp_rank in range(mesh.cp):
        ranks = mesh.replicas(cp_rank)
        norms = [ballots[rank].tally.grad_norm_sq for rank in ranks]
        if any(norm != norms[0] and not (math.isnan(norm) and math.isnan(norms[0])) for norm in norms):
            shown = ", ".join(f"rank {rank}: {norm!r}" for rank, norm in zip(ranks, norms, strict=True))
            raise ReplicasDiverged(
                f"step {step}: the replicas of cp_rank {cp_rank} hold different gradients ({shown}); one of these "
                "hosts has a faulty processor or memory",
                step=step,
                cp_rank=cp_rank,
            )
    if finding is not None and finding.quantity != LOCAL and not finding.is_over:
        raise ReplicasDiverged(finding.describe(step), step=step)
    shares = [ballot.tally for ballot in ballots]
    total = Tally(
        # Every ring has the same reduced gradient, so its norm is counted in the first ring only.
        _sum(shares[rank].grad_norm_sq for rank in mesh.ring(0)),
        _sum(share.num_nonfinite for share in shares),
        _sum(share.loss_sum for share in shares),
        _sum(share.num_tokens for share in shares),
        tuple(_sum(limbs) for limbs in zip(*(share.samples for share in shares), strict=True)),
        reduce(or_, (share.flags for share in shares)),
        max(shares, key=lambda share: share.spike.num_seen).spike,
    )
    return Outcome(
        Vote(step, total.numbers(), membership_id),
        tuple(ballot.work_s for ballot in ballots),
        finding,
        tuple(ballot.memory_share for ballot in ballots),
        max(ballot.expert_load for ballot in ballots),
    )


def _sum(values: Iterable[float]) -> float:
    """The sum in this order; `sum` of later Pythons rounds differently."""
    return reduce(add, values, 0.0)


def _find_corruption(step: int, ballots: list[Ballot], mesh: Mesh, corruption: str) -> Finding | None:
    """A finding that the run only reports; raises for every other finding."""
    if corruption == "off":
        return None
    first = [ballot.first if ballot.differing else None for ballot in ballots]
    differing = max((ballot.differing for ballot in ballots), key=QUANTITIES.index)
    finding = judge([ballot.digests for ballot in ballots], first, differing, mesh)
    if finding is None or corruption == "log":
        return finding
    if differing and finding.quantity == STATE and not finding.ranks and not finding.is_over:
        raise ReplicasDiverged(
            f"{finding.describe(step)}, in two attempts, and a spare would get one of the two. Nothing of the step was "
            "applied: go on from a checkpoint, on other machines, or with three rings, which show the wrong one",
            step=step,
        )
    if finding.ranks or not finding.is_over:
        raise ComputedWrongly(
            finding.describe(step), step=step, ranks=finding.ranks, what=finding.quantity, differs=finding.differs
        )
    return finding


# ---------------------------------------------------------------- skipped steps


def listed(sample_ids: Sequence[int]) -> str:
    """The numbers of sequences, for a message."""
    shown = ", ".join(map(str, sample_ids[:NUM_NAMED]))
    return f"{shown}, ..." if len(sample_ids) > NUM_NAMED else shown


def remark_on(outcome: Outcome, sample_ids: Callable[[int], Sequence[int]]) -> str:
    """A log line for a step with a loss spike or a skipped step; empty for an ordinary step."""
    step, loss, spike = outcome.vote.step, outcome.loss, outcome.spike
    if not spike and not outcome.skip:
        return ""
    sequences = f"; its sequences are {listed(sample_ids(step))}"
    if spike:
        response = {"clip": "gradients are clipped harder", "skip": "the step changes nothing"}.get(spike)
        return (
            f"loss spike in step {step}: {loss:.4g}, above {outcome.spike_limit:.4g}; "
            f"{response or 'nothing is done (loss_spike=log)'}{sequences}"
        )
    cause = "its gradient is not finite" if math.isfinite(loss) else f"its loss is {loss}"
    cause = cause if outcome.num_tokens else "no target of its sequences counts"
    return f"step {step} is skipped and changes nothing: {cause}{sequences}"


def watch_of(loss_spike: str, actions: Sequence[Action]) -> SpikeWatch | None:
    """The watch for loss spikes with the settings `loss_spike` and `loss_spike_actions`."""
    return None if loss_spike == "off" else SpikeWatch(actions if loss_spike == "act" else ())


def raise_for_skips(
    outcome: Outcome,
    in_a_row: int,
    max_skipped: int,
    sample_ids: Callable[[int], Sequence[int]],
    *,
    never_applied: bool,
    goes_back: bool,
) -> None:
    """End or undo training after too many skips; call it once the step is applied or its skip is counted.

    `in_a_row`: skips, with this step; `never_applied`: whether this was the last step of a run that skipped all. Raises
    TooManySkipped, LossSpike, and with `goes_back` MustGoBack.
    """
    step = outcome.vote.step
    if outcome.spike == "stop":
        raise LossSpike(
            f"step {step}: the loss is {outcome.loss:.4g}, and more than {outcome.spike_limit:.4g} is far above "
            f"the last {WINDOW} steps; loss_spike_actions has come to stop. The step was not applied. "
            f"Look at its sequences ({listed(sample_ids(step))}), lower the learning rate, or go on with "
            "loss_spike='log'",
            step=step,
        )
    if outcome.spike == "back":
        reason = f"the loss of step {step} is {outcome.loss:.4g}, above {outcome.spike_limit:.4g}"
        raise MustGoBack(reason, first_step=step, step=step)
    if never_applied:
        raise TooManySkipped(
            f"each of the {step + 1} steps was skipped, for a non-finite gradient or loss, or as no target counted: "
            "nothing was trained; look at the loss and its data",
            step=step,
        )
    if in_a_row <= max_skipped:
        return
    if goes_back:
        reason = f"{in_a_row} steps in a row up to step {step} were skipped (max_skipped={max_skipped})"
        raise MustGoBack(reason, first_step=step + 1 - in_a_row, step=step)
    raise TooManySkipped(
        f"step {step}: {in_a_row} steps in a row were skipped, for a non-finite gradient or loss or a loss "
        f"spike (max_skipped={max_skipped}); lower the learning rate, look at the data of these steps, "
        "or raise max_skipped",
        step=step,
    )
