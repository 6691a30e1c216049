"""Results of a pure function, kept by what they weigh: the newest stay, however many that are.

For what is large, made often and may never be asked for again, such as a plan for each sequence of packed documents.
Knows nothing of what it keeps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, ParamSpec, TypeVar
from weakref import WeakValueDictionary

_P = ParamSpec("_P")
_R = TypeVar("_R")


class KeptWithin(Generic[_P, _R]):
    """`make` of hashable arguments, remembered: those used longest ago are dropped while all together weigh more than
    `limit_bytes`. The newest stays whatever it weighs, and what somebody else holds is found again. What a result
    weighs may grow while it is kept."""

    def __init__(self, make: Callable[_P, _R], limit_bytes: int, weigh: Callable[[_R], int]) -> None:
        self._make, self._limit_bytes, self._weigh = make, limit_bytes, weigh
        self._kept: OrderedDict[Hashable, _R] = OrderedDict()
        self._alive: WeakValueDictionary[Hashable, _R] = WeakValueDictionary()
        self._lock = Lock()
        self.__doc__ = make.__doc__

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        key = (args, tuple(sorted(kwargs.items())))
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            held = self._alive.get(key)
        result = self._make(*args, **kwargs) if held is None else held
        with self._lock:
            self._kept[key] = self._alive[key] = result
            self._kept.move_to_end(key)
            weights = [self._weigh(each) for each in self._kept.values()]
            total = sum(weights)
            for weight in weights[:-1]:
                if total <= self._limit_bytes:
                    break
                self._kept.popitem(last=False)
                total -= weight
        return result

    def fresh(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Made and not remembered."""
        return self._make(*args, **kwargs)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return sum(self._weigh(each) for each in self._kept.values())

    def cache_clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self._alive.clear()


def kept_within(limit_bytes: int, weigh: Callable[[_R], int]) -> Callable[[Callable[_P, _R]], KeptWithin[_P, _R]]:
    """The decorator that makes a `KeptWithin` of a function."""
    return lambda make: KeptWithin(make, limit_bytes, weigh)
