"""Recognises an exception that means a device is out of memory, however it is wrapped."""

from __future__ import annotations

from collections.abc import Iterator

import torch

CONTEXT_HAS_NO_ROOM = "out of memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the chain of exceptions contains torch's out-of-memory error, or CUDA's when a context does not fit."""
    return any(
        isinstance(link, torch.OutOfMemoryError)
        or (isinstance(link, torch.AcceleratorError) and CONTEXT_HAS_NO_ROOM in str(link))
        for link in chain(error)
    )


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, then its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
