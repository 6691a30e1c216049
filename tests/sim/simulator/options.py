"""A simulated run's settings by their bare names, wherever they are declared, with short timeouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic_ring.config import CheckpointConfig, RunConfig, ScalingConfig, Timeouts
from elastic_ring.control.options import ControlOptions

# What the core does not know, below what simulations set.
UNSEEN = {
    **{"stopped_s": 0.001, "heart_floor_s": 0.002, "heart_cap_s": 0.003, "heart_computing_s": 0.004, "compile_s": 1e9},
    **{"park_s": 0.005, "beat_s": 0.001, "collective_s": 1e9},
}
TIMEOUTS = Timeouts(**{**UNSEEN, "report_s": 2.0, "gather_s": 1.0, "hello_s": 5.0, "boundary_s": 61.0})
RUN = RunConfig(
    timeouts=TIMEOUTS,
    copies="0",
    grow_delay_s=3.0,
    grow_cost_s=0.0,
    checkpoint_config=CheckpointConfig(0),
    straggler="act",
    memory_pressure="act",
)


def simulated(name: str, dp: int, cp: int, total_steps: int, **settings: Any) -> ControlOptions:
    """Options of a run of that name. `settings`: the rest by name, and `takes_checkpoints`."""
    scaling = ScalingConfig(dp=dp, cp=cp, max_dp=settings.pop("max_dp", None))
    return changed(ControlOptions(replace(RUN, name=name), scaling, total_steps), **settings)


def changed(options: ControlOptions, *, takes_checkpoints: bool | None = None, **settings: Any) -> ControlOptions:
    """The same with other settings."""

    def of(one: Any) -> dict[str, Any]:
        return {name: settings.pop(name) for name in set(settings) & set(one.__dataclass_fields__)}

    own, scaling, timeouts = of(options), replace(options.scaling, **of(options.scaling)), of(options.timeouts)
    run = replace(options.run, timeouts=replace(options.timeouts, **timeouts), **of(options.run))
    if takes_checkpoints is not None:
        run = replace(run, checkpoint_config=CheckpointConfig(every_steps=int(takes_checkpoints)))
    assert not settings, settings
    return replace(options, scaling=scaling, run=run, **own)
