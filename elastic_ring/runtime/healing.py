"""One heal of a build, over a link of its own: a donor sends its shard to the newcomers of its `cp_rank`.

Who gives and who receives is the command's to say; what goes over the link is `state.transfer`'s work.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from elastic_ring.control.messages import Heal
from elastic_ring.runtime.groups import Connector
from elastic_ring.runtime.transport import translated
from elastic_ring.state.transfer import receive_shard, send_shard
from elastic_ring.train.transaction import Transaction


def heal_over_link(
    heal: Heal, worker: str, state: Transaction, connector: Connector, strike: Callable[[str], None],
    timings: dict[str, float],
) -> int:
    """Send to or receive from the other workers of this heal; the bytes that went over the link.

    `strike(role)` gives planned faults their moment after each chunk; `timings` gets where the time went.
    Raises GroupAborted, PeerFailed, DigestMismatch; a newcomer's shard is not valid after any of them.
    """
    role, begun = "donor" if worker == heal.donor else "spare", time.monotonic()
    link = connector.link(f"{heal.cp_rank}/{heal.donor}", (heal.donor, *heal.newcomers), worker)
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
