"""What the control core costs grows as its members do: bytecodes are counted, so no clock and no other load matters."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

from benchmarks.recovery.sim_core import RECOVERIES, story
from elastic_ring.control import coordination
from tests.sim.simulator.options import simulated


def test_forming_and_recoveries_cost_the_same_for_each_member_of_a_mesh_four_times_as_large() -> None:
    few, many = _bytecodes(16), _bytecodes(64)
    assert few.keys() == many.keys() == {"forming", *RECOVERIES}
    growth = {part: many[part] / few[part] for part in few}
    assert all(times < 3.8 for times in growth.values()), growth


def _bytecodes(num_members: int) -> Counter[str]:
    """Part of the story → bytecodes of its decisions."""
    counted: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        counted[part] += 1
        return trace

    options = simulated("linear", dp=num_members // 4, cp=4, total_steps=1000, spares=16)
    state, now, before = coordination.initial(options), 0.0, sys.gettrace()
    events = story(num_members, options.scaling.cp)
    part, event = next(events)
    while True:
        now += options.timeouts.report_s / 4 / num_members
        sys.settrace(trace)
        try:
            state = coordination.advance(state, event, now).state
            coordination.next_deadline(state)
        finally:
            sys.settrace(before)
        try:
            part, event = events.send(state)
        except StopIteration:
            return counted
