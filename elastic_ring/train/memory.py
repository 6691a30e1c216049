"""Whether an exception means that a device's memory is full, whatever it has been wrapped in. Nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import torch

CONTEXT_HAS_NO_ROOM = "out of memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Somewhere in this chain of exceptions: the allocator's word, or CUDA's own where not even a context has room."""
    return any(
        isinstance(link, torch.OutOfMemoryError)
        or (isinstance(link, torch.AcceleratorError) and CONTEXT_HAS_NO_ROOM in str(link))
        for link in chain(error)
    )


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and what it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
