"""Observes this process's compilers: flash-attn-4's CuTe kernels, Triton's kernels, torch.compile (FlexAttention).

Announces each compilation before it begins, because a compiler holds the GIL for seconds and the process falls silent,
and counts compilations that the warm-up did not cover.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

log = logging.getLogger(__name__)

REASON_CHARACTERS, FIRST = 400, "for the first time"
_FLASH_ATTN_4 = "flash_attn.cute.interface"

Listener = Callable[[str], None]
"""Called in the compiling thread with the name of a compilation before it, and with "" after it."""


class CompileEvents:
    """The kernels that flash-attn-4 and Triton have compiled, or loaded from their caches on disk, by name.

    torch.compile keeps counts of its own (`CompileWatch` reads them); only the start and end of its
    compilations are announced here. Compilers are process-wide, so one instance per process, `EVENTS`, is enough.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.listener: Listener | None = None
        self.subject = ""
        """The purpose of the compilations under way, if known: torch.compile names only a number."""
        self._attached: set[str] = set()
        self._depth = 0  # compilations under way: torch.compile's code may compile kernels of Triton's

    def attach(self) -> None:
        """Observe each compiler that has been imported. Call it between steps, again after other imports; it costs
        microseconds."""
        self._depth = 0  # a compilation that raised has announced no end
        if _FLASH_ATTN_4 in sys.modules and _FLASH_ATTN_4 not in self._attached:
            self._attached.add(_FLASH_ATTN_4)
            # Each function of the interface looks up its kernel in an attribute of its own, and compiles on a miss.
            for name, function in list(vars(sys.modules[_FLASH_ATTN_4]).items()):
                cache = getattr(function, "compile_cache", None)
                if cache is not None:
                    function.compile_cache = ObservedCache(cache, f"flash-attn-4 {name.strip('_')}", self)
        if "triton.knobs" in sys.modules and "triton.knobs" not in self._attached:
            self._attached.add("triton.knobs")
            self._observe_triton(sys.modules["triton.knobs"])
        if "torch._dynamo.callback" in sys.modules:
            # `torch._dynamo.reset` drops all callbacks, so this is checked each time.
            handler = sys.modules["torch._dynamo.callback"].callback_handler
            if self._dynamo_begins not in handler.start_callbacks:
                handler.register_start_callback(self._dynamo_begins)
            if self._dynamo_ends not in handler.end_callbacks:
                handler.register_end_callback(self._dynamo_ends)

    def begin(self, name: str) -> None:
        """`name` is about to be compiled."""
        self._depth += 1
        if self.listener is not None:
            self.listener(f"{self.subject} ({name})" if self.subject else name)

    def end(self, name: str = "") -> None:
        """The compilation has ended; `name` is added to the list unless its compiler counts by itself.

        The listener is called once no other compilation is under way.
        """
        if name:
            self.names.append(name)
        self._depth = max(0, self._depth - 1)
        if self.listener is not None and self._depth == 0:
            self.listener("")

    def _observe_triton(self, knobs: Any) -> None:
        # Both hooks see each new specialisation of a kernel on each GPU, found on disk or not.
        runtime = knobs.runtime
        if runtime.jit_cache_hook is not None or runtime.jit_post_compile_hook is not None:
            log.warning("others use Triton's compile hooks: its compilations are neither counted nor announced")
            return

        def before(**about: Any) -> bool:
            self.begin(f"triton {about['fn'].name}")
            return False  # True would skip the compilation

        def after(**about: Any) -> None:
            self.end(f"triton {about['fn'].name}")

        runtime.jit_cache_hook, runtime.jit_post_compile_hook = before, after

    def _dynamo_begins(self, about: Any) -> None:
        self.begin(f"torch.compile {about.compile_id}")

    def _dynamo_ends(self, about: Any) -> None:
        self.end()


class ObservedCache:
    """A cache of compiled kernels, keyed by variant, that reports each variant which it did not hold before.

    Stands in for `flash_attn.cute.cache_utils.JITCache`, whose users test for a key, compile and store on a miss, and
    look the kernel up. With a cache on disk the test itself may load the kernel.
    """

    def __init__(self, cache: Any, name: str, events: CompileEvents) -> None:
        self._cache, self._name, self._events = cache, name, events
        self._known = set(getattr(cache, "cache", ()))
        events.names.extend([name] * len(self._known))

    def __contains__(self, key: Any) -> bool:
        if key in self._known:
            return True
        if key not in self._cache:
            self._events.begin(self._name)
            return False
        self._known.add(key)
        self._events.names.append(self._name)  # loaded from disk by the test itself: no compilation began
        return True

    def __setitem__(self, key: Any, kernel: Any) -> None:
        self._cache[key] = kernel
        if key not in self._known:
            self._known.add(key)
            self._events.end(self._name)

    def __getitem__(self, key: Any) -> Any:
        return self._cache[key]

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._known)

    def clear(self) -> None:
        self._known.clear()
        self._cache.clear()


EVENTS = CompileEvents()


class CompileWatch:
    """Counts this process's compilations from now on: flash-attn-4's and Triton's kernels, torch.compile's functions.

    A kernel that is loaded from its compiler's cache on disk counts too: the process had not met that variant before.
    """

    def __init__(self) -> None:
        EVENTS.attach()
        self.count = 0
        self._has_trained = False
        self._num_events = len(EVENTS.names)
        self._num_graphs = _num_graphs()
        self._since_us = time.time_ns() // 1000

    def news(self) -> list[str]:
        """The name of each kernel and function compiled since the last call; for a function of torch.compile with the
        reason of its recompilation."""
        EVENTS.attach()
        names = EVENTS.names[self._num_events :]
        self._num_events += len(names)
        if (number := _num_graphs() - self._num_graphs) > 0:
            since_us, self._since_us = self._since_us, time.time_ns() // 1000
            self._num_graphs += number
            functions = [
                f"{entry.co_name} ({' '.join((entry.recompile_reason or FIRST).split())[:REASON_CHARACTERS]})"
                for entry in sys.modules["torch._dynamo"].utils.get_compilation_metrics()
                if entry.is_forward is not False and not entry.is_runtime and (entry.start_time_us or 0) >= since_us
            ]
            names += [*functions, *["?"] * number][:number]
        self.count += len(names)
        return names

    def before_steps(self) -> None:
        """Until this process has trained, its compilations count as before its first step."""
        if not self._has_trained:
            self.news()

    def of_step(self, step: int) -> tuple[list[str], int | None]:
        """(names of a step's compilations, none for step 0; the number before this process's first step and in step 0,
        None after the first call). Warns of compilations: the step is slow, and every rank waits."""
        later, before = self.news(), self.count
        if step == 0:
            later = []
        else:
            before -= len(later)
        if later:
            text = "; ".join(later)
            log.warning("step %d compiled %d more: %s; the warm-up did not cover it", step, len(later), text)
        is_first, self._has_trained = not self._has_trained, True
        return later, before if is_first else None


def _num_graphs() -> int:
    """Graphs that torch's compiler made; 0 if nothing has loaded it."""
    dynamo = sys.modules.get("torch._dynamo")
    return 0 if dynamo is None else int(dynamo.utils.counters["stats"]["unique_graphs"])
