"""Recognises errors of an exchange: of a socket, the store, gloo or NCCL, as torch raises them.

The store and NCCL have exception types of their own. Gloo raises plain RuntimeErrors that begin with a place in its
source. A user's error may have the same words, but gloo raises in native code: the innermost frame of the traceback
stands at a call, not at a `raise` statement.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from elastic_ring.errors import GroupAborted, PeerFailed

_TYPES = (PeerFailed, GroupAborted, dist.DistNetworkError, dist.DistStoreError, dist.DistBackendError)
_NATIVE_MARKS = ("gloo/", "Gloo connect", "NCCL error", "NCCL communicator")


def is_transport_error(error: BaseException | None) -> bool:
    """Whether gloo, NCCL, the store or a socket of theirs failed somewhere in this chain of exceptions."""
    while error is not None:
        if isinstance(error, _TYPES) or _is_native_error(error):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _is_native_error(error: BaseException) -> bool:
    """Whether native code of gloo or NCCL raised it: of this very type, with these words, and at no `raise`."""
    trace = error.__traceback__
    if type(error) is not RuntimeError or trace is None or not any(mark in str(error) for mark in _NATIVE_MARKS):
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code.co_code
    is_at_raise = 0 <= trace.tb_lasti < len(code) and dis.opname[code[trace.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")
    return not is_at_raise


@contextmanager
def translated(connector: Any) -> Iterator[None]:
    """Turns torch's transport errors into GroupAborted or PeerFailed; leaves all others alone. `connector`: the
    `groups.Connector` that may have been aborted."""
    try:
        yield
    except GroupAborted:
        raise
    except BaseException as error:
        if not is_transport_error(error):
            raise
        if connector.aborted:
            raise GroupAborted(f"generation {connector.where.prefix} was aborted") from error
        raise PeerFailed(f"{type(error).__name__}: {error}") from error
