"""One heal of a build, over a link of its own: a donor sends its shard to the newcomers of its `cp_rank`.

Who gives and who receives is the command's to say; what goes over the link is `state.transfer`'s work.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from elastic_ring.control.messages import Build, Heal
from elastic_ring.runtime.groups import Connector, LinkCall
from elastic_ring.runtime.transport import translated
from elastic_ring.state.transfer import receive_shard, send_shard
from elastic_ring.train.transaction import Transaction


def links_ahead(command: Build, worker: str) -> list[LinkCall]:
    """The links of this worker that can connect beside the groups: those whose workers all build groups now. Each of
    them finds the same in the command, in the same order; a donor without a seat comes to its link when it can."""
    seated = set(command.seats)
    ready = [heal for heal in command.heals if seated.issuperset(_workers_of(heal))]
    return [link_call(heal, worker) for heal in ready if worker in _workers_of(heal)]


def _workers_of(heal: Heal) -> tuple[str, ...]:
    return (heal.donor, *heal.newcomers)


def link_call(heal: Heal, worker: str) -> LinkCall:
    """How `worker` asks for the link of a heal."""
    return f"{heal.cp_rank}/{heal.donor}", _workers_of(heal), worker


def heal_over_link(
    heal: Heal, worker: str, state: Transaction, connector: Connector, strike: Callable[[str], None],
    timings: dict[str, float],
) -> int:
    """Send to or receive from the other workers of this heal; the bytes that went over the link.

    `strike(role)` gives planned faults their moment after each chunk; `timings` gets where the time went.
    Raises GroupAborted, PeerFailed, DigestMismatch; a newcomer's shard is not valid after any of them.
    """
    role, begun = "donor" if worker == heal.donor else "spare", time.monotonic()
    link = connector.link(*link_call(heal, worker))
    timings["link_s"] = time.monotonic() - begun

    def after_chunk() -> None:
        strike(role)

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
