"""Random fault schedules, by seed. Data only; `simulate` injects the faults."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from elastic_ring.control.options import ControlOptions, parse_copies
from tests.sim.simulator.options import changed, simulated

FAULTS = {
    "kill": 10,
    "freeze": 3,
    "glitch": 2,
    "raise": 1,
    "apply": 2,
    "poison": 2,
    "corrupt": 1,
    "drain": 3,
    "kill-node": 2,
    "drain-node": 1,
    "join": 3,
    "restart": 3,
    "split": 2,
    "bad-start": 1,
    "echo": 3,
    "kill-in-vote": 8,
    "kill-in-build": 5,
    "kill-in-heal": 3,
}
"""Fault → weight in the random schedule. `OWN` are those that a worker finds in itself, in a step or in a build."""

OWN = ("device", "raise")
SHORT = ("memory", "memory-kill", "tight")
"""A worker whose steps need some reliefs of the memory ladder, or more than there are; one that its agent kills; memory
that is nearly full."""
STORED = ("damage",)
"""What happens to checkpoints."""
GROWN = ("grow", "cut")
"""A longer manifest of the corpus is written; the power goes, and the run is submitted again."""
SPIKES = ("spike",)
"""Some of the next batches have a loss for which everyone is to go back."""
HELD = ("flip", "lose-copies", "flip-in-transfer")
"""What happens to copies in memory and on their way."""

JOINS_S = (0.1, 2.0, 4.0, 12.0)
"""Agents connect at once, one after the other, and later than a start waits for them."""


@dataclass(frozen=True)
class Schedule:
    """What happens in one simulated run. Rates are shares of messages; times are seconds of virtual time.

    `nodes`: how many workers fit on each; `gpus`: how many GPUs each has, none given where nothing limits members.
    `save_every`: steps between checkpoints, 0 for none. `num_zones`: failure domains of the nodes, 0 if nobody says.
    `spot`: the share of spot machines among them. `joins_s`: after how long the agent of each node has connected; at
    once if empty. `clocks_differ`: those of the hosts on which coordinators run.
    """

    options: ControlOptions
    nodes: tuple[int, ...]
    faults: tuple[tuple[float, str], ...]
    lost: float
    doubled: float
    faults_end_s: float
    gpus: tuple[int, ...] = ()
    save_every: int = 0
    num_zones: int = 0
    spot: float = 0.0
    joins_s: tuple[float, ...] = ()
    clocks_differ: bool = False


def random_schedule(seed: int) -> Schedule:
    rng = random.Random(seed)
    dp, cp = rng.choice([(1, 1), (1, 2), (2, 1), (2, 2), (2, 2), (2, 3), (3, 2), (3, 3), (4, 2)])
    spares_wanted = rng.choice([0, 1, 1, 2, 3])
    total = dp * cp + spares_wanted
    num_nodes = rng.randint(1, 4)
    slots = [0] * num_nodes
    for index in range(total + rng.choice([0, 0, 1, 3])):
        slots[index % num_nodes] += 1
    options = simulated(
        "simulated",
        dp=dp,
        cp=cp,
        total_steps=rng.randint(3, 40),
        spares=spares_wanted,
        min_dp=rng.choice([1, 1, dp]),
        max_dp=rng.choice([None, dp + 1, dp + 2]),
        report_s=1.0,
        build_s=6.0,
        restore_s=6.1,
        start_s=5.0,
        hello_s=1.0,
        boundary_s=6.1,
        finalize_s=4.0,
        spare_grace_s=0.5,
        grow_delay_s=0.5,
        backoff_s=3.0,
        crash_loop_limit=rng.choice([3, 50]),
        build_failure_limit=100,
        round_limit=100,
        finalize_limit=100,
    )
    kinds = rng.choices(list(FAULTS), weights=list(FAULTS.values()), k=rng.randint(0, 12))
    horizon = rng.choice([3.0, 8.0])
    clustered = rng.random() < 0.3
    moment = rng.uniform(0.5, horizon)
    faults = sorted((moment + rng.uniform(0, 0.4) if clustered else rng.uniform(0.3, horizon), kind) for kind in kinds)
    lossy = rng.random() < 0.4
    schedule = Schedule(
        options,
        tuple(slots),
        tuple(faults),
        rng.choice([0.02, 0.1]) if lossy else 0.0,
        0.1 if rng.random() < 0.5 else 0.0,
        horizon + 1.0,
    )
    # Numbers of their own: whatever has no limits is the same run as before there were any.
    limits, own = random.Random(f"seats of {seed}"), random.Random(f"own troubles of {seed}")
    schedule = _with_gpus(schedule, limits) if limits.random() < 0.35 else schedule
    schedule = _with_own_failures(schedule, own) if own.random() < 0.3 else schedule
    saves = random.Random(f"checkpoints of {seed}")
    schedule = _with_checkpoints(schedule, saves) if saves.random() < 0.4 else schedule
    scaling = random.Random(f"scaling of {seed}")
    schedule = _with_scaling(schedule, scaling) if scaling.random() < 0.25 else schedule
    zones = random.Random(f"zones of {seed}")
    if zones.random() < 0.3:
        schedule = replace(schedule, num_zones=zones.randint(1, 3), spot=zones.choice([0.0, 0.5, 1.0]))
    short = random.Random(f"memory of {seed}")
    schedule = _with_shortages(schedule, short) if short.random() < 0.25 else schedule
    growing = random.Random(f"corpus of {seed}")
    schedule = _with_growing_corpus(schedule, growing) if growing.random() < 0.3 else schedule
    held = random.Random(f"copies of {seed}")
    schedule = _with_copies(schedule, held) if held.random() < 0.5 else schedule
    spikes = random.Random(f"spikes of {seed}")
    has_sources = schedule.save_every or schedule.options.run.copies != "0"
    return _with_spikes(schedule, spikes) if spikes.random() < (0.2 if has_sources else 0.01) else schedule


def schedule_with_edges(seed: int) -> Schedule:
    """`random_schedule`, where agents connect at times of their own and hosts have clocks of their own."""
    schedule, rng = random_schedule(seed), random.Random(f"joins and clocks of {seed}")
    if rng.random() < 0.4:
        schedule = replace(schedule, joins_s=tuple(rng.choice(JOINS_S) * rng.random() for _ in schedule.nodes))
    return replace(schedule, clocks_differ=rng.random() < 0.5)


def _with_gpus(schedule: Schedule, rng: random.Random) -> Schedule:
    """The same on nodes with GPUs, even or uneven, now and then too few of them, and standby processes beside them;
    with some more of what takes or frees a single GPU."""
    num_nodes, wanted = len(schedule.nodes), schedule.options.scaling.mesh.size
    gpus = [0] * num_nodes
    even = rng.random() < 0.5
    for index in range(max(1, wanted + rng.choice([-1, 0, 0, 0, 1, 2]))):
        gpus[index % num_nodes if even else rng.randrange(num_nodes)] += 1
    slots = tuple(num_gpus + rng.choice([0, 1, 1, 2]) for num_gpus in gpus)
    more = [(rng.uniform(0.5, schedule.faults_end_s), rng.choice(["drain", "kill"])) for _ in range(rng.randint(0, 4))]
    return replace(schedule, nodes=slots, gpus=tuple(gpus), faults=tuple(sorted([*schedule.faults, *more])))


def _with_own_failures(schedule: Schedule, rng: random.Random) -> Schedule:
    """The same with some workers whose GPU errs, or whose code raises."""
    more = [(rng.uniform(0.3, schedule.faults_end_s), rng.choice(OWN)) for _ in range(rng.randint(1, 5))]
    return replace(schedule, faults=tuple(sorted([*schedule.faults, *more])))


def _with_shortages(schedule: Schedule, rng: random.Random) -> Schedule:
    """The same with some workers that run out of memory, and reliefs that are taken back after a few steps."""
    more = [(rng.uniform(0.3, schedule.faults_end_s), rng.choice(SHORT)) for _ in range(rng.randint(1, 3))]
    options = changed(schedule.options, memory_relax_steps=rng.choice([0, 1, 3, 10]))
    return replace(schedule, options=options, faults=tuple(sorted([*schedule.faults, *more])))


def _with_checkpoints(schedule: Schedule, rng: random.Random) -> Schedule:
    """The same with checkpoints, some of which get damaged, and more losses that reach every holder of a shard."""
    more = [(rng.uniform(0.5, schedule.faults_end_s), "damage") for _ in range(rng.randint(0, 2))]
    moment = rng.uniform(1.0, schedule.faults_end_s)
    more += [(moment + rng.uniform(0, 0.2), "kill") for _ in range(rng.choice([0, 2, 4, 8]))]
    options = changed(schedule.options, takes_checkpoints=True)
    return replace(
        schedule, options=options, save_every=rng.choice([1, 2, 5]), faults=tuple(sorted([*schedule.faults, *more]))
    )


def _with_scaling(schedule: Schedule, rng: random.Random) -> Schedule:
    """The same for a run that is asked for fewer or more rings and spares while it trains."""
    more = [(rng.uniform(0.5, schedule.faults_end_s), "scale") for _ in range(rng.randint(1, 3))]
    return replace(schedule, faults=tuple(sorted([*schedule.faults, *more])))


def _with_spikes(schedule: Schedule, rng: random.Random) -> Schedule:
    """The same with batches for which everyone goes back to copies or a checkpoint from before them."""
    more = [(rng.uniform(0.5, schedule.faults_end_s), rng.choice(SPIKES)) for _ in range(rng.randint(1, 3))]
    options = changed(schedule.options, rollback_limit=rng.choice([2, 50, 50]))
    return replace(schedule, options=options, faults=tuple(sorted([*schedule.faults, *more])))


def _with_growing_corpus(schedule: Schedule, rng: random.Random) -> Schedule:
    """The same while longer manifests are written, and now and then a power cut after which it is submitted again."""
    last_s = schedule.faults_end_s
    more = [(rng.uniform(0.1, last_s), "grow") for _ in range(rng.randint(1, 6))]
    more += [(rng.uniform(1.0, last_s), "cut") for _ in range(rng.choice([0, 0, 1, 2]))]
    return replace(schedule, faults=tuple(sorted([*schedule.faults, *more])))


def _with_copies(schedule: Schedule, rng: random.Random) -> Schedule:
    """The same with copies or parities, half of the time on one ring only, some of them damaged or lost, and with more
    losses of one or a few members."""
    if rng.random() < 0.5 and not schedule.gpus:
        schedule = _on_one_ring(schedule, rng)
    size = schedule.options.scaling.mesh.size
    modes = [
        mode for mode in ("1", "2", "parity:2", "parity:3", "parity:4") if parse_copies(mode).num_ranks_needed <= size
    ]
    if not modes:
        return schedule
    options = changed(schedule.options, copies=rng.choice(modes), copy_every_steps=rng.choice([1, 2, 3, 5, 10]))
    more = [(rng.uniform(0.5, schedule.faults_end_s), "kill") for _ in range(rng.randint(0, 3))]
    moment = rng.uniform(1.0, schedule.faults_end_s)
    more += [(moment + rng.uniform(0, 0.1), "kill") for _ in range(rng.choice([0, 1, 2, 3]))]
    if rng.random() < 0.4:
        more += [(rng.uniform(0.5, schedule.faults_end_s), rng.choice(HELD)) for _ in range(rng.randint(1, 4))]
    return replace(schedule, options=options, faults=tuple(sorted([*schedule.faults, *more])))


def _on_one_ring(schedule: Schedule, rng: random.Random) -> Schedule:
    """The same on one ring, where nobody has a replica."""
    options = schedule.options
    cp = rng.choice([2, 3, 4, 4, 5])
    slots = [0] * len(schedule.nodes)
    for index in range(cp + options.scaling.spares + rng.choice([0, 1])):
        slots[index % len(slots)] += 1
    max_dp = rng.choice([None, None, 2])
    return replace(schedule, options=changed(options, dp=1, cp=cp, min_dp=1, max_dp=max_dp), nodes=tuple(slots))
