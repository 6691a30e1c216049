"""One heal of a build: newcomers get their `cp_rank`'s live shard from a donor, or in a build that steps back a
snapshot from a peer's memory, whole or as parts of a parity.

The command names the donor, who then holds the snapshot, a copy or a parity, and for a parity the other workers of its
group, whose snapshots are its remaining parts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from elastic_ring.control.messages import Heal, SnapshotId
from elastic_ring.runtime.groups.groups import Connector, Groups
from elastic_ring.runtime.groups.transport import translated
from elastic_ring.runtime.worker.copies import Copies
from elastic_ring.state import sealed
from elastic_ring.state.snapshot import named
from elastic_ring.state.transfer import Link, receive_shard, send_shard
from elastic_ring.train.transaction import Transaction

log = logging.getLogger(__name__)


def heal_over_link(
    heal: Heal,
    worker: str,
    members: Sequence[str],
    state: Transaction,
    groups: Groups | None,
    connector: Connector,
    inject: Callable[[str], None],
    timings: dict[str, float],
) -> int:
    """Send to or receive from the other workers of this heal; returns the bytes transferred.

    `inject(role)` is called after each chunk, for planned faults; durations are added to `timings`.
    Raises GroupAborted, PeerFailed, DigestMismatch; a newcomer's shard is not valid after any of them.
    """
    role, begun = "donor" if worker == heal.donor else "spare", time.monotonic()
    link = _link(heal, worker, members, groups, connector)
    timings["link_s"] = time.monotonic() - begun

    def after_chunk() -> None:
        inject(role)

    with translated(connector):
        assert state.shard is not None
        if role == "donor":
            assert state.valid
            num_bytes = send_shard(state.shard, link, after_chunk=after_chunk)
        else:
            with state.filling():
                num_bytes = receive_shard(state.shard, link, after_chunk=after_chunk)
    connector.retire(link)
    timings.update(link.timings)
    return num_bytes


def _link(heal: Heal, worker: str, members: Sequence[str], groups: Groups | None, connector: Connector) -> Link:
    """The generation's own groups where all workers of the heal hold one shard in its mesh, else a link of its own."""
    workers = (heal.donor, *heal.newcomers)
    if groups is not None and set(workers) <= set(members):
        link = groups.link([members.index(one) for one in workers])
        if link is not None:
            return link
    return connector.link(f"{heal.cp_rank}/{heal.donor}", workers, worker)


def takes_part(heal: Heal, worker: str) -> bool:
    return worker in (*heal.senders, *heal.newcomers)


def heal_from_copies(
    heal: Heal,
    wanted: SnapshotId,
    worker: str,
    copies: Copies,
    state: Transaction,
    connector: Connector,
    inject: Callable[[str], None],
    timings: dict[str, float],
) -> int:
    """Send to the newcomers, or become the snapshot that arrives; returns the bytes sent to each, or received.

    `inject(role)` is called after each chunk, for planned faults. Raises GroupAborted, PeerFailed, DigestMismatch; a
    newcomer's shard is not valid after any of them.
    """
    own = _piece(heal, wanted, worker, copies) if worker in heal.senders else None
    begun = time.monotonic()
    workers = tuple(dict.fromkeys((*heal.senders, *heal.newcomers)))
    link = connector.host_link(f"copies/{heal.cp_rank}/{heal.donor}/{heal.newcomers[0]}", workers, worker)
    timings["link_s"] = time.monotonic() - begun
    with translated(connector):
        if worker in heal.newcomers:
            ends = {sender: workers.index(sender) for sender in heal.senders}
            with state.filling():
                num_bytes = _receive(heal, wanted, link, ends, own, copies, state, lambda: inject("spare"))
        else:
            assert own is not None
            num_bytes = _send(link, own, [workers.index(one) for one in heal.newcomers], lambda: inject("donor"))
    timings["wire_s"] = time.monotonic() - begun - timings["link_s"]
    what = "a parity and its parts" if heal.parity_from else "a copy"
    log.warning(
        "cp_rank %d of %s went from %s to %s as %s: %d bytes in %.3f s",
        heal.cp_rank,
        named(wanted),
        ", ".join(heal.senders),
        ", ".join(heal.newcomers),
        what,
        num_bytes,
        timings["wire_s"],
    )
    return num_bytes


def _piece(heal: Heal, wanted: SnapshotId, worker: str, copies: Copies) -> Tensor:
    if worker == heal.donor:
        return copies.piece(wanted, heal.cp_rank, heal.parity_from)
    return copies.own_piece(wanted)


def _send(link: Any, piece: Tensor, receivers: list[int], after_chunk: Callable[[], None]) -> int:
    """Returns once every newcomer has acknowledged: between hosts a completed send may still be in flight."""
    for work in [work for receiver in receivers for work in sealed.send(link, piece, receiver)]:
        work.wait()
        after_chunk()
    for receiver in receivers:
        link.recv([torch.empty(1, dtype=torch.uint8)], receiver, 0).wait()
    return piece.numel()


def _receive(
    heal: Heal,
    wanted: SnapshotId,
    link: Any,
    ends: Mapping[str, int],
    own: Tensor | None,
    copies: Copies,
    state: Transaction,
    after_chunk: Callable[[], None],
) -> int:
    """`ends`: the senders' ranks in `link`; `own`: this worker's part of the parity, if it is a sender itself."""
    pieces: list[Tensor] = []
    num_bytes = 0
    for sender, end in ends.items():
        if own is not None and end == link.rank():
            pieces.append(own)
            continue
        what = f"what {sender} sent of cp_rank {heal.cp_rank} of {named(wanted)}"
        pieces.append(sealed.receive(link, end, copies.buffer, what, after_chunk))
        num_bytes += pieces[-1].numel()
    for end in ends.values():
        if own is None or end != link.rank():
            link.send([torch.ones(1, dtype=torch.uint8)], end, 0).wait()
    whole, *others = pieces
    if heal.parity_from:
        parity = whole.clone() if own is whole else whole  # it is used up, and may be needed once more
        whole = sealed.missing_piece(parity, others, f"the snapshot of cp_rank {heal.cp_rank} of {named(wanted)}")
    assert state.shard is not None
    copies.healed(wanted, heal.cp_rank, whole, state.shard)
    return num_bytes
