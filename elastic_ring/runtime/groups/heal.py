"""One heal of a build: a donor sends its shard to the newcomers of its `cp_rank`, over a link of their own.

The command names donor and newcomers; `state.transfer` moves the shard.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from elastic_ring.control.messages import Build, Heal
from elastic_ring.runtime.groups.groups import Connector, LinkCall
from elastic_ring.runtime.groups.transport import translated
from elastic_ring.state.transfer import receive_shard, send_shard
from elastic_ring.train.transaction import Transaction


def links_ahead(command: Build, worker: str) -> list[LinkCall]:
    """The links of this worker that can connect beside the groups: those whose workers are all members. All of them get
    the same links in the same order. The link of a donor that is no member connects later."""
    members = set(command.members)
    ready = [heal for heal in command.heals if members.issuperset(_workers_of(heal))]
    return [link_call(heal, worker) for heal in ready if worker in _workers_of(heal)]


def _workers_of(heal: Heal) -> tuple[str, ...]:
    return (heal.donor, *heal.newcomers)


def link_call(heal: Heal, worker: str) -> LinkCall:
    """The arguments of `Connector.link` for `worker`'s end of a heal."""
    return f"{heal.cp_rank}/{heal.donor}", _workers_of(heal), worker


def heal_over_link(
    heal: Heal,
    worker: str,
    state: Transaction,
    connector: Connector,
    inject: Callable[[str], None],
    timings: dict[str, float],
) -> int:
    """Send to or receive from the other workers of this heal; returns the bytes transferred.

    `inject(role)` is called after each chunk, for planned faults; durations are added to `timings`.
    Raises GroupAborted, PeerFailed, DigestMismatch; a newcomer's shard is not valid after any of them.
    """
    role, begun = "donor" if worker == heal.donor else "spare", time.monotonic()
    link = connector.link(*link_call(heal, worker))
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
