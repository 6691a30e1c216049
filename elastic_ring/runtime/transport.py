"""Which errors are those of an exchange: of a socket, the store, gloo or NCCL, as torch raises them."""

from __future__ import annotations

import torch.distributed as dist

from elastic_ring.errors import GroupAborted, PeerFailed


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
