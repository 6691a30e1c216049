"""Who heals whom in the next mesh. Pure; the mesh is decided already."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from elastic_ring.control.messages import Heal
from elastic_ring.mesh import Mesh

if TYPE_CHECKING:
    from elastic_ring.control.placement.policy import Situation, Source


def heals_of(situation: Situation, mesh: Mesh, members: tuple[str, ...]) -> tuple[Heal, ...]:
    """The heals of the next mesh: newcomers of a shard are divided among its donors.

    Donors are verified holders in the new mesh, else leaving ones, else workers that can supply the shard of a
    snapshot. A member that has a copy of its shard itself needs no heal.
    """
    in_new_mesh = set(members)
    copied = {cp_rank: _copiers(sources) for cp_rank, sources in situation.sources.items()}
    ranked = [(worker, rank % mesh.cp) for rank, worker in enumerate(members)]
    placed = {worker for worker, cp_rank in ranked if situation.holders.get(worker) == cp_rank}
    served = placed | {worker for worker, cp_rank in ranked if worker in copied.get(cp_rank, ())}
    healers: dict[int, list[str]] = defaultdict(list)
    for worker, cp_rank in situation.holders.items():
        healers[cp_rank].append(worker)
    heals: list[Heal] = []
    for cp_rank in range(mesh.cp):
        needy = [members[rank] for rank in mesh.replicas(cp_rank) if members[rank] not in served]
        if not needy:
            continue
        in_mesh = [worker for worker in healers[cp_rank] if worker in placed]
        donors = in_mesh or [worker for worker in healers[cp_rank] if worker not in in_new_mesh]
        donors = donors or _settled_first(copied.get(cp_rank, []), in_new_mesh - served)
        for index, donor in enumerate(donors):
            if needy[index :: len(donors)]:
                heals.append(Heal(cp_rank, donor, tuple(needy[index :: len(donors)])))
        if not donors:
            heals += _from_parity(cp_rank, needy, situation.sources.get(cp_rank, ()))
    return tuple(heals)


def _copiers(sources: tuple[Source, ...]) -> list[str]:
    return [source.donor for source in sources if not source.parity_from]


def _settled_first(copiers: list[str], newcomers: set[str]) -> list[str]:
    """Those that hold a copy and need no heal themselves, if there are any: others would send before they receive."""
    return [worker for worker in copiers if worker not in newcomers] or copiers


def _from_parity(cp_rank: int, needy: list[str], sources: tuple[Source, ...]) -> list[Heal]:
    """One heal for each newcomer, spread over the parities that have this shard."""
    parities = [source for source in sources if source.parity_from]
    assert parities, f"cp_rank {cp_rank} has a holder, but it was given a rank of another shard"
    chosen = [parities[index % len(parities)] for index in range(len(needy))]
    return [
        Heal(cp_rank, source.donor, (newcomer,), source.parity_from)
        for newcomer, source in zip(needy, chosen, strict=True)
    ]
