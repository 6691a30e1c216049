"""The vote: one small all-gather before the optimizer, and its result.

Each rank contributes one row; every rank reduces the same table in rank order, so all get the same bits. The vote
completes on one rank only if every rank entered it, which makes the step a transaction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic_ring.control.decisions.corruption import LOCAL, STATE, WHATS, Digests, Finding, Suspicion, judge
from elastic_ring.control.decisions.loss_spikes import CLIP_SHARE, VERDICTS, SpikeBallot
from elastic_ring.control.messages import Vote
from elastic_ring.errors import ElasticRingError
from elastic_ring.mesh import Mesh

FIELDS = (
    "grad_norm_sq",
    "num_nonfinite",
    "loss_sum",
    "num_tokens",
    "boundary",
    "checkpoint",
    "copies",
    "samples_0",
    "samples_1",
    "samples_2",
    "samples_3",
    "spike_num_seen",
    "spike_limit",
    "spike_verdict",
    "spike_clips_harder",
    "work_s",
    "memory_share",
    "told_state",
    "told_reduced",
    "told_norm_sq",
    "told_own",
    "told_again",
    "first_what",
    "first_state",
    "first_reduced",
    "first_norm_sq",
    "first_own",
    "first_again",
)
NUM_SAMPLE_LIMBS = 4
SPIKE_FIELDS = frozenset(name for name in FIELDS if name.startswith("spike_"))
"""Of these the vote takes what one rank says, and no sum."""
DUE, BUSY = 1.0, -1048576.0
"""What ranks say of a checkpoint; a single `BUSY` outweighs the one `DUE`."""
COPYING, COPY_FAILED = 1.0, 1048576.0
"""What ranks say of the last copies in peers' memory, where these are not complete."""


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
    """One rank's row. Sums run over the rank's own slices; `samples` are the limbs of the consumed digest.

    `checkpoint`: `DUE` from the rank that knows that one is due, `BUSY` from one that still writes the last, else 0.
    `copies`: `COPYING` or `COPY_FAILED` from a rank whose part of the last copies is not complete, else 0. `spike`:
    what it knows of the losses before. `work_s`: how long it worked itself for each of its sequences, without waits for
    others, in seconds; 0 if not measured. `digests`: what it computed. `first`: the same of its attempt at this step
    before, where ranks did not agree. `memory_share`: how near it came to the end of its memory (`MemoryGauge`).
    """

    grad_norm_sq: float
    num_nonfinite: int
    loss_sum: float
    num_tokens: int
    boundary: bool
    samples: tuple[float, ...]
    checkpoint: float = 0.0
    copies: float = 0.0
    spike: SpikeBallot = field(default_factory=SpikeBallot)
    work_s: float = 0.0
    digests: Digests = field(default_factory=Digests)
    first: Suspicion | None = None
    memory_share: float = 0.0

    def row(self) -> torch.Tensor:
        first = (WHATS.index(self.first.what), *self.first.told.numbers()) if self.first else (0.0,) * 6
        values = (
            self.grad_norm_sq,
            self.num_nonfinite,
            self.loss_sum,
            self.num_tokens,
            self.boundary,
            self.checkpoint,
            self.copies,
            *self.samples,
            self.spike.num_seen,
            self.spike.limit,
            self.spike.verdict,
            self.spike.clips_harder,
            self.work_s,
            self.memory_share,
            *self.digests.numbers(),
            *first,
        )
        return torch.tensor([float(v) for v in values], dtype=torch.float64)


@dataclass(frozen=True)
class Outcome:
    """The result of a vote. Gradients are of the summed loss; `grad_norm` is of the mean loss.

    `work_s` and `memory_shares`: each rank's, as in `Ballot`; empty where the result came later, from another rank.
    `finding`: which rank computed wrongly, if the run only reports it.
    """

    vote: Vote
    work_s: tuple[float, ...] = ()
    finding: Finding | None = None
    memory_shares: tuple[float, ...] = ()

    @property
    def num_tokens(self) -> float:
        return self._get("num_tokens")

    @property
    def loss(self) -> float:
        return self._get("loss_sum") / self.num_tokens if self.num_tokens else 0.0

    @property
    def grad_norm(self) -> float:
        norm_sq = self._get("grad_norm_sq")
        return math.sqrt(norm_sq) / max(1.0, self.num_tokens) if norm_sq >= 0 else math.nan

    @property
    def skip(self) -> bool:
        """Whether the step changes nothing: its gradient or loss is not finite, or a loss spike is not trained on."""
        return not self.is_finite or self.spike in ("skip", "stop", "back")

    @property
    def is_finite(self) -> bool:
        """Whether both the gradient and the loss are."""
        return self._get("num_nonfinite") == 0 and math.isfinite(self.grad_norm) and math.isfinite(self.loss)

    @property
    def spike(self) -> str:
        """What follows if the loss is a spike, one of `loss_spikes.VERDICTS`; empty if it is none."""
        is_one = self.is_finite and 0 < self.spike_limit < self.loss
        return VERDICTS[int(self._get("spike_verdict"))] if is_one else ""

    @property
    def spike_limit(self) -> float:
        """The loss above which this step's is a spike; 0 where that is not known."""
        return self._get("spike_limit")

    @property
    def clips_harder(self) -> bool:
        """Whether the gradient is clipped at `CLIP_SHARE` of the usual bound, for this step's spike or a recent one."""
        return self.spike == "clip" or self._get("spike_clips_harder") > 0

    @property
    def boundary(self) -> bool:
        return self._get("boundary") > 0

    @property
    def checkpoint(self) -> bool:
        """Whether every rank saves its state after this step."""
        return self._get("checkpoint") > 0

    @property
    def checkpoint_missed(self) -> bool:
        """Whether one was due, but some rank still writes the last."""
        return self._get("checkpoint") < 0 and self._get("checkpoint") % BUSY != 0

    @property
    def copying(self) -> bool:
        """Whether some rank still sends or receives the last copies."""
        return self._get("copies") % COPY_FAILED > 0

    @property
    def copies_failed(self) -> bool:
        """Whether some rank's part of the last copies was not completed."""
        return self._get("copies") >= COPY_FAILED

    @property
    def samples(self) -> tuple[float, ...]:
        first = FIELDS.index("samples_0")
        return self.vote.values[first : first + NUM_SAMPLE_LIMBS]

    def scale(self, clip_norm: float | None) -> float:
        """The factor for the summed gradient: mean over tokens, times clipping."""
        mean = 1.0 / max(1.0, self.num_tokens)
        if clip_norm is not None and self.clips_harder:
            clip_norm *= CLIP_SHARE
        if clip_norm is None or self.grad_norm <= clip_norm:
            return mean
        return mean * clip_norm / self.grad_norm

    def _get(self, name: str) -> float:
        return self.vote.values[FIELDS.index(name)]


def start_vote(group: Any, ballot: Ballot) -> tuple[Any, list[torch.Tensor]]:
    """Enter the vote; returns (work, rows), valid once the work is done."""
    rows = [torch.empty(len(FIELDS), dtype=torch.float64) for _ in range(group.size())]
    return group.allgather([rows], [ballot.row()]), rows


def count(
    step: int, rows: list[torch.Tensor], mesh: Mesh, membership_id: tuple[int, int], corruption: str = "off"
) -> Outcome:
    """Reduce the table in rank order; `membership_id` is the (term, generation) of the voters.

    Raises ReplicasDiverged when replicas of a shard disagree, and with corruption "act" ComputedWrongly for what a
    replacement or a second try may mend.
    """
    table = [row.tolist() for row in rows]
    finding = _look_for_wrong(step, table, mesh, corruption)
    _check_replicas(step, table, mesh)
    if finding is not None and finding.what != LOCAL and not finding.is_over:
        raise ReplicasDiverged(finding.told(step), step=step)
    totals = []
    seen = FIELDS.index("spike_num_seen")
    longest = max(range(mesh.size), key=lambda rank: (table[rank][seen], -rank))
    for column, name in enumerate(FIELDS):
        if name in SPIKE_FIELDS:
            totals.append(table[longest][column])
            continue
        # Every ring has the same reduced gradient, so its norm is counted in the first ring only.
        ranks = mesh.ring(0) if name == "grad_norm_sq" else range(mesh.size)
        total = 0.0
        for rank in ranks:
            total += table[rank][column]
        totals.append(total)
    work_s = tuple(row[FIELDS.index("work_s")] for row in table)
    shares = tuple(row[FIELDS.index("memory_share")] for row in table)
    return Outcome(Vote(step, tuple(totals), membership_id), work_s, finding, shares)


def _look_for_wrong(step: int, table: list[list[float]], mesh: Mesh, corruption: str) -> Finding | None:
    """A finding that the run only reports; raises for every other one."""
    if corruption == "off":
        return None
    told_at, first_at = FIELDS.index("told_state"), FIELDS.index("first_what")
    now = [Digests(*row[told_at:first_at]) for row in table]
    first = [Digests(*row[first_at + 1 :]) if row[first_at] else None for row in table]
    what = WHATS[int(max(row[first_at] for row in table))]
    finding = judge(now, first, what, mesh)
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


def _check_replicas(step: int, table: list[list[float]], mesh: Mesh) -> None:
    for cp_rank in range(mesh.cp):
        norms = [table[rank][0] for rank in mesh.replicas(cp_rank)]
        if any(norm != norms[0] and not (math.isnan(norm) and math.isnan(norms[0])) for norm in norms):
            ranks = mesh.replicas(cp_rank)
            shown = ", ".join(f"rank {rank}: {norm!r}" for rank, norm in zip(ranks, norms, strict=True))
            raise ReplicasDiverged(
                f"step {step}: the replicas of cp_rank {cp_rank} hold different gradients ({shown}); one of these "
                "hosts has a faulty processor or memory",
                step=step,
                cp_rank=cp_rank,
            )
