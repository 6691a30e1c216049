"""The rendezvous store of one generation: a TCPStore that listens on one address, with keys that only members know.

torch's store has no authentication. So its socket is bound here, to the coordinator's own address (torch binds to all
interfaces) or to loopback where all nodes share a host, on a free port. All keys lie under a random prefix that only
the coordinator's commands carry. The kernel drops packets from hosts without a member. That keeps out other runs, port
scanners and stragglers, but not a client on a host of the run while a generation is built: torch 2.13 lists keys to
any client, and takes what it sends. Its holder closes it as soon as all members have come.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Collection, Iterable

from torch.distributed import PrefixStore, Store, TCPStore

from elastic_ring.runtime.groups.sockets import LOOPBACK, keep_out

BACKLOG = 2048  # as torch's own


class RendezvousStore:
    """Listens on `host` and on a port of its own for as long as it lives. `secret` is the prefix of all keys. From
    `hosts` alone one may connect; from everywhere if there are none."""

    def __init__(self, host: str, hosts: Collection[str] = ()) -> None:
        with socket.create_server((host, 0), backlog=BACKLOG) as listener:
            if hosts:
                keep_out(listener, hosts)
            self.host, self.port, self.secret = host, listener.getsockname()[1], secrets.token_hex(16)
            self.server = TCPStore(
                host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )

    @property
    def keys(self) -> Store:
        """As a client with the secret sees it."""
        return with_secret(self.server, self.secret)


def with_secret(store: TCPStore, secret: str) -> Store:
    """The keys under `secret`; all of them where it is empty."""
    return PrefixStore(secret, store) if secret else store


def common_host(own: str, nodes: Iterable[str]) -> str:
    """Where nodes of these addresses reach the one at `own`: by loopback if they are all the same host."""
    return LOOPBACK if all(address == own for address in nodes) else own
