"""No counter of the package is worse than its bound; the counters see what they count."""

from __future__ import annotations

import ast

from tests.unit.project.counters import (
    BOUNDS,
    NO_NAMES,
    ROOT,
    Function,
    Module,
    aliases,
    bound_names,
    counters,
    is_plain,
    is_untyped,
)


def module_of(source: str) -> Module:
    return Module(ROOT / "elastic_ring" / "module.py", tuple(ast.walk(ast.parse(source))))


def test_no_counter_is_worse_than_its_bound():
    counts = counters()
    assert counts.keys() == BOUNDS.keys()
    assert {title: count for title, count in counts.items() if not BOUNDS[title].holds(count)} == {}


def test_each_binding_of_a_word_that_is_no_name_is_seen():
    source = """
def f(found, *, told=0):
    one, (others, x) = found
    for asked in told: pass
    with x as said: pass
    if (gone := x): known = [what for what in x]
    self.who, other.taken, x["made"], self.told_of.y = x

class Data:
    wanted: int
    given: int = 3
    found_at: int
"""
    words = [name for _, name in bound_names(module_of(source).nodes) if name in NO_NAMES]
    assert sorted(words) == sorted(NO_NAMES - {"made", "taken", "told_of"})


def test_a_function_is_counted_unless_it_is_a_property_a_dunder_an_overload_or_a_stub():
    source = """
class A:
    def __init__(self): self.x = 0
    @property
    def y(self): return self.x
    @y.setter
    def y(self, y): self.x = y
    @functools.cached_property
    def z(self): return 1
    @typing.overload
    def f(self, x: int) -> int: return 0
    def stub(self) -> int: ...
    def passes(self) -> int:
        "Says so."
        pass
    @cache
    def method(self):
        async def nested(): return 1
        return lambda: nested
"""
    names = [node.name for node in module_of(source).nodes if isinstance(node, Function) and is_plain(node)]
    assert names == ["method", "nested"]


def test_an_alias_of_an_untyped_mapping_is_one():
    source = "A = dict[str, Any]\nB: TypeAlias = typing.Mapping[str, typing.Any]\nC = dict[str, int]\nD = list[A]"
    module = module_of(source)
    assert aliases(module) == {"A", "B"}
    assert sum(map(is_untyped, module.nodes)) == 2
