"""Which errors are those of an exchange: of a socket, the store, gloo or NCCL, as torch raises them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from elastic_ring.errors import GroupAborted, PeerFailed

if TYPE_CHECKING:
    from elastic_ring.runtime.groups import Connector


def is_transport_error(error: BaseException | None) -> bool:
    """Whether gloo, the store or a socket failed somewhere in this chain of exceptions."""
    while error is not None:
        if isinstance(error, (PeerFailed, GroupAborted, dist.DistNetworkError, dist.DistStoreError)):
            return True
        if isinstance(error, dist.DistBackendError):
            return True
        if isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo/", "Gloo", "NCCL")):
            return True
        error = error.__cause__ or error.__context__
    return False


class translated:
    """Turns torch's transport errors into GroupAborted or PeerFailed; leaves all others alone."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, GroupAborted):
            return
        if self._connector.aborted and is_transport_error(error):
            raise GroupAborted(f"generation {self._connector.where.prefix} was aborted") from error
        if is_transport_error(error):
            raise PeerFailed(f"{type(error).__name__}: {error}") from error
