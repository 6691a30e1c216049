"""What the compilers of this process compile: flash-attn-4's CuTe kernels, Triton's kernels, torch.compile's functions.

A compiler holds the GIL for seconds. Its start is announced to one listener, so that the silence of the process has a
known cause. Which steps compile, and what to say of it, is not decided here.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

log = logging.getLogger(__name__)

_FLASH_ATTN_4 = "flash_attn.cute.interface"

Listener = Callable[[str], None]
"""Called with what is about to be compiled, in the compiling thread, and with "" once it has been."""


class CompileEvents:
    """The kernels that flash-attn-4 and Triton have compiled, or loaded from their caches on disk, by name.

    torch.compile keeps counts of its own (`compiling.CompileWatch` reads them); only the start and end of its
    compilations are announced here. Compilers are process-wide, so one instance per process, `EVENTS`, is enough.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.listener: Listener | None = None
        self.subject = ""
        """What is being compiled for, where that is known: torch.compile names only a number."""
        self._attached: set[str] = set()
        self._depth = 0  # compilations under way: torch.compile's code may compile kernels of Triton's

    def attach(self) -> None:
        """Observe each compiler that has been imported. Call it between steps, again after other imports; it costs
        microseconds."""
        self._depth = 0  # a compilation that raised has announced no end
        for module, observe in (
            (_FLASH_ATTN_4, self._observe_flash_attn_4),
            ("triton.knobs", self._observe_triton),
        ):
            if module in sys.modules and module not in self._attached:
                self._attached.add(module)
                observe(sys.modules[module])
        if "torch._dynamo.callback" in sys.modules:
            self._observe_dynamo(sys.modules["torch._dynamo.callback"])

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

    def _observe_flash_attn_4(self, interface: Any) -> None:
        # Each function of the interface looks up its kernel in an attribute of its own, and compiles on a miss.
        for name, function in list(vars(interface).items()):
            cache = getattr(function, "compile_cache", None)
            if cache is not None:
                function.compile_cache = ObservedCache(cache, f"flash-attn-4 {name.strip('_')}", self)

    def _observe_triton(self, knobs: Any) -> None:
        # Both hooks see each new specialisation of a kernel on each GPU, found on disk or not.
        runtime = knobs.runtime
        if runtime.jit_cache_hook is not None or runtime.jit_post_compile_hook is not None:
            log.warning("Triton's compile hooks are taken: its compilations are neither counted nor announced")
            return

        def before(**about: Any) -> bool:
            self.begin(f"triton {about['fn'].name}")
            return False  # True would skip the compilation

        def after(**about: Any) -> None:
            self.end(f"triton {about['fn'].name}")

        runtime.jit_cache_hook, runtime.jit_post_compile_hook = before, after

    def _observe_dynamo(self, callback: Any) -> None:
        # `torch._dynamo.reset` forgets all callbacks: this is asked anew each time.
        handler = callback.callback_handler
        if self._dynamo_begins not in handler.start_callbacks:
            handler.register_start_callback(self._dynamo_begins)
        if self._dynamo_ends not in handler.end_callbacks:
            handler.register_end_callback(self._dynamo_ends)

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
