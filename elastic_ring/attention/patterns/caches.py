"""LRU caches bounded by count, and bounded by bytes: the latter for large results that may never be needed again, such
as a mask per length of a document. Nothing about attention in here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from threading import Lock
from typing import Any, Generic, ParamSpec, TypeVar
from weakref import WeakValueDictionary

_P = ParamSpec("_P")
_R = TypeVar("_R")


class LRUCache:
    """At most `limit` values; the least recently used is dropped first. Not for several threads."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], _R]) -> _R:
        """The value of `key`; makes it if it is missing."""
        if key not in self._values:
            self._values[key] = make()
            if len(self._values) > self._limit:
                self._values.popitem(last=False)
        self._values.move_to_end(key)
        value: _R = self._values[key]
        return value

    def __len__(self) -> int:
        return len(self._values)

    def values(self) -> Iterable[Any]:
        return self._values.values()


class SizedLRU(Generic[_P, _R]):
    """LRU cache of `make`, bounded by `limit_bytes`; `weigh` gives a result's bytes, which may grow while it is cached.

    The newest result always stays. A dropped result that is still referenced elsewhere is reused."""

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

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return sum(self._weigh(each) for each in self._kept.values())
