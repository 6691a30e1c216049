"""The workers and nodes of a state with counts of them, so that no event has to look at all of them.

All values are immutable: a change makes a new version, which shares what stays. No decisions here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field
from operator import add, sub
from typing import Any, NamedTuple, TypeVar, overload

from elastic_ring.control.messages import with_changes

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")
_ABSENT: Any = object()


@dataclass(frozen=True)
class Worker:
    """One started process. `status`: starting, ready, stopping (released or killed, its end not confirmed).

    `deadline`: when a starting worker counts as failed or a stopping one is killed (again). `start_deadline`: upper
    bound of `deadline`, however much progress a start shows. `start_cpu_s`: CPU seconds that the start has reported;
    None: no report. `doing`: the work that it reported last. `hired_at`: when its start was ordered. `written_off`:
    stopping, and no recovery waits for it; it still uses its slot.
    """

    worker: str
    node: str
    status: str
    deadline: float
    draining: bool = False
    written_off: bool = False
    start_deadline: float = 0.0
    start_cpu_s: float | None = None
    hired_at: float = 0.0
    doing: str = ""


@dataclass(frozen=True)
class Node:
    """A node with room for `num_slots` workers, of which `num_gpus` may be members at the same time (None: no limit).

    `start_failures`: consecutive failed starts. `start_errors`: those of them that gave an error of their own, the last
    of which is `last_failure`. No worker starts here before `backoff_until`. `leaves_at`: when a draining node is gone;
    0: unknown. `domains` and `is_reserved` as in `NodeJoined`. `avoided`: a member there was slow or computed
    wrongly: the last to be hired on, and its spares the last to be taken.
    """

    node: str
    num_slots: int
    draining: bool = False
    start_failures: int = 0
    start_errors: int = 0
    backoff_until: float = 0.0
    last_failure: str = ""
    num_gpus: int | None = None
    leaves_at: float = 0.0
    domains: tuple[str, ...] = ()
    is_reserved: bool = False
    avoided: bool = False


class Versions(Mapping[K, V]):
    """A dict that never changes: `having` and `without` give the next version.

    It is a dict that versions share and the few changes since. These are folded in when they are more than the root of
    its size, so a change costs that root and not the size. It keeps a dict's order.
    """

    __slots__ = ("_base", "_recent", "_size")

    def __init__(self, items: Mapping[K, V] | None = None) -> None:
        self._base: dict[K, V] = dict(items or {})
        self._recent: dict[K, V] = {}
        self._size = len(self._base)

    def having(self, items: Mapping[K, V]) -> Versions[K, V]:
        new: Versions[K, V] = object.__new__(Versions)
        new._base, new._recent, new._size = self._base, {**self._recent, **items}, self._size
        for key in items:
            new._size += key not in self._recent and key not in self._base
        if len(new._recent) ** 2 > len(new._base):
            new._whole()
        return new

    def without(self, keys: Iterable[K]) -> Versions[K, V]:
        left = dict(self._whole())
        for key in keys:
            left.pop(key, None)
        return Versions(left)

    def _whole(self) -> dict[K, V]:
        if self._recent:  # the base first: another thread reads the same of either
            self._base = {**self._base, **self._recent}
            self._recent = {}
        return self._base

    def __getitem__(self, key: K) -> V:
        value = self._recent.get(key, _ABSENT)
        return self._base[key] if value is _ABSENT else value

    @overload
    def get(self, key: K) -> V | None: ...
    @overload
    def get(self, key: K, default: V | D) -> V | D: ...
    def get(self, key: K, default: Any = None) -> Any:
        value = self._recent.get(key, _ABSENT)
        return self._base.get(key, default) if value is _ABSENT else value

    def __contains__(self, key: object) -> bool:
        return key in self._recent or key in self._base

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[K]:
        return iter(self._whole())

    def values(self) -> ValuesView[V]:
        return self._whole().values()

    def items(self) -> ItemsView[K, V]:
        return self._whole().items()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Versions):
            return isinstance(other, Mapping) and self._whole() == dict(other)
        if self._size != other._size:
            return False
        if self._base is not other._base:
            return self._whole() == other._whole()
        # The latest change first: consecutive versions differ in it.
        return all(self[key] == other.get(key, _ABSENT) for key in (*reversed(self._recent), *other._recent))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._whole())


class WorkerCounts(NamedTuple):
    """Numbers of workers. `live`: not stopping; `staying`: of these not draining, and `ready` of these. `leaving`:
    draining and ready, so they use their GPU until they hand over. `visible`: starting, with progress."""

    used: int = 0
    live: int = 0
    staying: int = 0
    ready: int = 0
    leaving: int = 0
    starting: int = 0
    visible: int = 0


_NOBODY = WorkerCounts()


def _counted(worker: Worker | None) -> WorkerCounts:
    if worker is None:
        return _NOBODY
    status, stays = worker.status, not worker.draining
    if status == "ready":
        return WorkerCounts(1, 1, stays, stays, not stays)
    if status == "starting":
        return WorkerCounts(1, 1, stays, 0, 0, 1, worker.start_cpu_s is not None)
    return WorkerCounts(1)


_Heap = tuple[tuple[float, str], int, Any, Any]
"""A leftist heap: (deadline, worker), the length of its right edge, two heaps or None."""


def _merged(first: _Heap | None, second: _Heap | None) -> _Heap | None:
    if first is None or second is None:
        return first or second
    if second[0] < first[0]:
        first, second = second, first
    left, right = first[2], _merged(first[3], second)
    assert right is not None
    if left is None or left[1] < right[1]:
        left, right = right, left
    return first[0], 1 + (right[1] if right is not None else 0), left, right


@dataclass(frozen=True)
class Pool:
    """The workers and nodes of a state, with counts that each change keeps up to date.

    `counts`, `on`: node → numbers of its workers, their names in the order of their start. `total`: of all.
    `num_spares`, `mesh_size`: what is wanted, by which nodes share the standbys. `draining`, `dying` (stopping and
    waited for): names of workers. `crowded`: nodes with more workers than GPUs; `free`: with a free GPU; `shelf`: with
    room for a standby. `version`: another object whenever more changes than the progress of a start.
    """

    num_spares: int = 0
    mesh_size: int = 1
    workers: Versions[str, Worker] = field(default_factory=Versions)
    nodes: Versions[str, Node] = field(default_factory=Versions)
    counts: Versions[str, WorkerCounts] = field(default_factory=Versions)
    on: Versions[str, tuple[str, ...]] = field(default_factory=Versions)
    total: WorkerCounts = _NOBODY
    draining: frozenset[str] = frozenset()
    dying: frozenset[str] = frozenset()
    crowded: frozenset[str] = frozenset()
    free: frozenset[str] = frozenset()
    shelf: frozenset[str] = frozenset()
    due: _Heap | None = None
    version: object = field(default_factory=object)

    @property
    def earliest(self) -> float | None:
        """The first deadline of a worker that is not ready."""
        return None if self.due is None else self.due[0][0]

    def having_nodes(self, nodes: Mapping[str, Node]) -> Pool:
        return with_changes(self, nodes=self.nodes.having(nodes), version=object())._judged(nodes)

    def without_node(self, name: str) -> Pool:
        return with_changes(self, nodes=self.nodes.without([name]), version=object())._judged([name])

    def having(self, changes: Mapping[str, Worker | None]) -> Pool:
        """With these workers; without those of None."""
        total, due, counts, on = self.total, self.due, dict[str, WorkerCounts](), dict[str, tuple[str, ...]]()
        for name, after in changes.items():
            before = self.workers.get(name)
            worker = after or before
            if worker is None:
                continue
            node, old, new = worker.node, _counted(before), _counted(after)
            if old != new:
                there = counts[node] if node in counts else self.counts_on(node)
                counts[node] = WorkerCounts(*map(add, there, map(sub, new, old)))
                total = WorkerCounts(*map(add, total, map(sub, new, old)))
            if before is None or after is None:
                names: tuple[str, ...] = on[node] if node in on else self.on.get(node, ())
                on[node] = (*names, name) if before is None else tuple(other for other in names if other != name)
            if after is not None and after.status != "ready" and (before is None or before != after):
                due = _merged(due, ((after.deadline, name), 1, None, None))
        kept = {name: worker for name, worker in changes.items() if worker is not None}
        workers = self.workers.having(kept) if kept else self.workers
        workers = workers if len(kept) == len(changes) else workers.without(changes.keys() - kept.keys())
        while due is not None:
            entry = workers.get(due[0][1])
            if entry is not None and entry.status != "ready" and entry.deadline == due[0][0]:
                break
            due = _merged(due[2], due[3])  # that deadline counts no more
        draining = frozenset(name for name, worker in kept.items() if worker.draining)
        dying = frozenset(
            name for name, worker in kept.items() if worker.status == "stopping" and not worker.written_off
        )
        pool = with_changes(
            self,
            workers=workers,
            total=total,
            due=due,
            on=self.on.having(on) if on else self.on,
            draining=self.draining.difference(changes) | draining,
            dying=self.dying.difference(changes) | dying,
        )
        if not counts and (pool.draining, pool.dying) == (self.draining, self.dying):
            return pool
        return with_changes(pool, counts=self.counts.having(counts), version=object())._judged(counts)

    def _judged(self, names: Iterable[str]) -> Pool:
        sets = {"crowded": self.crowded, "free": self.free, "shelf": self.shelf}
        for name in names:
            node = self.nodes.get(name)
            beyond, left = (0, 0) if node is None else (self.num_beyond(node), self.gpus_left(node))
            has_slot = node is not None and not node.draining and node.num_slots > self.counts_on(name).used
            is_shelf = has_slot and node is not None and left <= 0 and beyond < self.share(node)
            for kind, holds in (("crowded", beyond > 0), ("free", has_slot and left > 0), ("shelf", is_shelf)):
                if holds != (name in sets[kind]):
                    sets[kind] = sets[kind] ^ {name}
        return with_changes(self, **sets)

    def counts_on(self, node: str) -> WorkerCounts:
        return self.counts.get(node, _NOBODY)

    def num_beyond(self, node: Node) -> int:
        """Standbys of this node: staying workers beyond its free GPUs."""
        if node.num_gpus is None:
            return 0
        return max(0, self.counts_on(node.node).staying - self._num_free_gpus(node.node, node.num_gpus))

    def gpus_left(self, node: Node) -> int:
        """How many more workers fit on the node and could be members."""
        there = self.counts_on(node.node)
        room = node.num_slots - there.used
        if node.num_gpus is None:
            return room
        return min(room, self._num_free_gpus(node.node, node.num_gpus) - there.staying)

    def share(self, node: Node) -> int:
        """The node's maximum number of standbys, by its share of the mesh's GPUs; all if it can hold the mesh alone."""
        return -(-self.num_spares * (node.num_gpus or 0) // self.mesh_size)

    def _num_free_gpus(self, node: str, num_gpus: int) -> int:
        return max(0, num_gpus - self.counts_on(node).leaving)

    def usable(self, names: frozenset[str], now: float) -> list[Node]:
        """The named nodes that are not in backoff, in the order in which they joined."""
        ordered = names if len(names) < 2 else (name for name in self.nodes if name in names)
        return [node for node in map(self.nodes.__getitem__, ordered) if node.backoff_until <= now]


def pool_of(workers: Mapping[str, Worker], nodes: Mapping[str, Node], num_spares: int, mesh_size: int) -> Pool:
    return Pool(num_spares, mesh_size).having_nodes(nodes).having(workers)


def placeable(
    workers: Iterable[str], using_gpu: Iterable[str], node_of: Mapping[str, str], gpus_on: Mapping[str, int]
) -> list[str]:
    """The `workers` that can be members at the same time, in the given order; earlier ones take precedence.

    `using_gpu`: workers that use a GPU now; they need not be in `workers` (draining ones are not). `gpus_on`: number
    of GPUs of each node that has a limit. Any subset of the result respects every limit: on a node with g GPUs, u of
    them in use, at most min(u, g) users and at most max(0, g - u) others are returned: a member of the last mesh keeps
    its GPU until it gets `Standby`, whether or not it is in the next mesh.
    """
    if not gpus_on:
        return list(workers)
    users = set(using_gpu)
    used_on = Counter(node_of[worker] for worker in users)
    for_users = dict(gpus_on)
    for_others = {node: num_gpus - used_on[node] for node, num_gpus in gpus_on.items()}
    able = []
    for worker in workers:
        node, left = node_of[worker], for_users if worker in users else for_others
        if left.get(node, 1) <= 0:
            continue
        able.append(worker)
        if node in left:
            left[node] -= 1
    return able
