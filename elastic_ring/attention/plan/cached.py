"""lru_cache that skips one-shot (routed) rules.

A pattern that content chose for one call never recurs: caching what follows from it would evict that of static ones.
For small results of pure functions only: plans belong to an owner (`ring_plans`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def static_lru_cache(maxsize: int) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """`lru_cache`, unless the first argument, a rule, is `for_one_call`."""

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        cached: Any = lru_cache(maxsize)(function)

        @wraps(function)
        def call(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
            planned: Any = args[0]
            result: Result = (function if planned.for_one_call else cached)(*args, **options)
            return result

        call.cache_info, call.cache_clear = cached.cache_info, cached.cache_clear  # type: ignore[attr-defined]
        return call

    return decorate
