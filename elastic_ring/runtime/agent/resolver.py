"""How long this machine takes to look a name up by address: torch does so at each rendezvous.

With a resolver that does not answer every rendezvous takes ten seconds longer, so that is looked for at the start.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from contextlib import suppress

LIMIT_S = 2.0
"""A resolver that is reachable answers, or refuses, within a second."""


def lookup_s(address: str) -> float:
    """Seconds that a look-up of the name of `address` takes, at most about LIMIT_S; it need not have one."""
    done: queue.Queue[None] = queue.Queue()

    def look() -> None:
        try:
            socket.getnameinfo((address, 0), 0)
        except OSError:
            pass  # nobody knows the address: a quick answer, which is what counts
        finally:
            done.put(None)

    begun = time.monotonic()
    threading.Thread(target=look, name="resolver", daemon=True).start()
    with suppress(queue.Empty):
        done.get(timeout=LIMIT_S)
    return time.monotonic() - begun


def warning(node: str, address: str, took_s: float) -> str:
    """What a run says of a node whose look-up took so long; empty if that is fast enough."""
    if took_s < LIMIT_S:
        return ""
    return (
        f"node {node}: its resolver does not answer for its own address {address} within {LIMIT_S:g} s, which makes "
        "every rendezvous up to 10 s longer. Name the nodes in /etc/hosts there, or take the resolver out of "
        "/etc/resolv.conf"
    )
