"""Recognises errors of an exchange: of a socket, the store, gloo or NCCL, as torch raises them.

The store and NCCL have exception types of their own. Gloo raises plain RuntimeErrors that begin with a place in its
source. A user's error may have the same words, but gloo raises in native code: the innermost frame of the traceback
stands at a call, not at a `raise` statement.
"""

from __future__ import annotations

import dis
from types import TracebackType
from typing import Any, Protocol

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
    return (
        type(error) is RuntimeError
        and any(mark in str(error) for mark in _NATIVE_MARKS)
        and error.__traceback__ is not None
        and not _ends_at_raise(error.__traceback__)
    )


def _ends_at_raise(trace: TracebackType) -> bool:
    """Whether the innermost frame of a traceback was executing a `raise` or `assert` statement."""
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code.co_code
    return 0 <= trace.tb_lasti < len(code) and dis.opname[code[trace.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")


class Abortable(Protocol):
    """As `groups.Connector`."""

    where: Any

    @property
    def aborted(self) -> bool: ...


class translated:
    """Turns torch's transport errors into GroupAborted or PeerFailed; leaves all others alone."""

    def __init__(self, connector: Abortable) -> None:
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
