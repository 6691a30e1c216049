"""The phase `update` between vote and apply: Muon's exchange, and its repetition before a roll forward.

It changes no state, so an abort drops nothing. A rank applies only once all ranks have their rows, which they keep
until their own apply has ended. So after an abort either nobody has applied and all survivors have the gradient, or
each that is behind has its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from elastic_ring.errors import PeerFailed
from elastic_ring.state.header import ShardMeta
from elastic_ring.train.muon import Division, Party, UpdateRun, matrix_parts
from elastic_ring.train.task import TrainingTask
from elastic_ring.train.vote import Outcome
from elastic_ring.train.wrap import trained_shapes

if TYPE_CHECKING:
    from elastic_ring.train.transaction import Transaction

ABSENT, HAS_ROWS, LACKS_ROWS = range(3)
"""Statuses of a rank: it has applied, or is a newcomer; it can apply; it cannot yet."""


def divide(task: TrainingTask, model: nn.Module, units: Sequence[nn.Module], cp: int) -> Division | None:
    """Who orthogonalises which matrix of a wrapped module; None without Muon."""
    parts = matrix_parts(model, units) if task.optim.optimizer == "muon" else {}
    return Division(trained_shapes(model, task.frozen), parts, cp) if parts else None


def other_matrices(meta: ShardMeta, division: Division) -> list[str]:
    """Names of stored parameters that were Muon's and are not, or are and were not: `units` decides it."""
    stored = [(str(name), bool(group.get("muon"))) for group in meta.groups for name in group["params"]]  # type: ignore[union-attr]
    return sorted(name for name, is_matrix in stored if is_matrix != (name in division.columns))


def exchange_update(state: Transaction, outcome: Outcome) -> None:
    """Muon's update of a step, inside each ring; returns once all ranks have theirs. Raises as its exchanges."""
    if state.now.division is None or outcome.skip:
        return
    _compute(state, outcome, _ring(state))
    gather_statuses(state, HAS_ROWS)


def repeat_update(state: Transaction, outcome: Outcome, *, is_behind: bool, in_mesh: bool = True) -> None:
    """Before a roll forward, on all ranks of the mesh: if one that `is_behind` lacks its rows, all these compute the
    update again.

    A ring with a newcomer lacks its gradient: then the ranks of all rings compute together, in host memory's group.
    Raises PeerFailed if they do not hold each cp_rank, and outside of the mesh; the shards of those that lack rows are
    not valid after it, and are healed by those that have theirs.
    """
    held = state.held
    own = ABSENT if not is_behind else LACKS_ROWS if held.update is None else HAS_ROWS
    if state.task.optim.optimizer != "muon" or outcome.skip or not (in_mesh or own == LACKS_ROWS):
        return
    if not in_mesh:
        held.filled = False
        raise PeerFailed(f"step {outcome.vote.step}: its update cannot be computed outside of the mesh")
    now = state.now
    statuses = gather_statuses(state, own)
    if LACKS_ROWS not in statuses:
        return
    ranks = tuple(rank for rank, status in enumerate(statuses) if status != ABSENT)
    cp_ranks = tuple(now.mesh.coordinate(rank).cp_rank for rank in ranks)
    if missing := set(range(now.mesh.cp)) - set(cp_ranks):
        held.filled = held.filled and own != LACKS_ROWS
        raise PeerFailed(f"no rank of the mesh has cp_rank {min(missing)}'s gradient of step {outcome.vote.step}")
    rings = [set(now.mesh.ring(dp_rank)) for dp_rank in range(now.mesh.dp)]
    if is_behind and all(ring <= {*ranks} or ring.isdisjoint(ranks) for ring in rings):
        _compute(state, outcome, _ring(state))
    elif is_behind:
        among, index = now.groups.among(ranks), ranks.index(now.groups.global_rank)
        _compute(state, outcome, Party(among, index, cp_ranks, torch.device("cpu"), now.abandoned))
    gather_statuses(state, own)


def gather_statuses(state: Transaction, status: int) -> list[int]:
    """The status of each rank; returns once all ranks have come here."""
    world = state.now.groups.world
    rows = [torch.empty(1) for _ in range(world.size())]
    world.allgather([rows], [torch.tensor([float(status)])]).wait()
    return [int(row) for row in rows]


def _ring(state: Transaction) -> Party:
    now = state.now
    cp_ranks = tuple(range(now.mesh.cp))
    return Party(now.groups.ring, now.coordinate.cp_rank, cp_ranks, state.device, now.abandoned)


def _compute(state: Transaction, outcome: Outcome, party: Party) -> None:
    held, now, step = state.held, state.now, outcome.vote.step
    assert now.division is not None
    assert held.shard is not None

    def look(number: int) -> None:
        state.watch("update", step, number)
        now.groups.check()

    scale = outcome.scale(state.task.optim.clip_norm)
    update = UpdateRun(now.division, held.shard, held.gradient.views, scale, party).run(step, look)
    if state.device.type == "cuda":
        torch.cuda.current_stream(state.device).synchronize()
    now.groups.check()  # an abort ends NCCL's exchanges without an error
    held.update = update
