"""The alerts of deploy/monitoring/rules.yml that a laptop can provoke: what is planted in which run. A table only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elastic_ring.cli.drills import planted

Constants = tuple[tuple[str, str], ...]

SMALL = (
    "--preset", "laptop", "--dp", "1", "--cp", "1", "--spares", "0", "--context", "256", "--global-batch", "2",
    "--steps", "1000000", "--checkpoint-every-steps", "0", "--cpus-per-worker", "1",
)  # fmt: skip
"""The run of every drill; what a drill adds wins."""
PATIENT = (
    "--run.timeouts.stopped-s", "90", "--run.timeouts.heart-floor-s", "100", "--run.timeouts.heart-cap-s", "110",
    "--run.timeouts.heart-computing-s", "115", "--run.timeouts.report-s", "120", "--run.timeouts.build-s", "150",
)  # fmt: skip
"""A hang stays for longer than the drill: the run would end it by itself after seconds."""


@dataclass(frozen=True)
class AlertDrill:
    """`plants`: the fault, in words. `train`: settings of the run, beside SMALL. `cpus` of each node. `plant` is called
    after `after_steps` steps. The rule's durations are divided by `speed`;
    `constants` are replaced in it, and those that `measured` gives when the run trains."""

    plants: str
    train: tuple[str, ...] = ()
    cpus: tuple[int, ...] = (4,)
    plant: Callable[[planted.Scene], None] | None = None
    after_steps: int = 5
    speed: float = 60.0
    constants: Constants = ()
    measured: Callable[[], Constants] | None = None


def raising(first: int, last: int, every: int) -> str:
    """A schedule in which the user's code raises once in each of these steps."""
    return "; ".join(f"raise@step={step},phase=forward" for step in range(first, last, every))


DRILLS: Mapping[str, AlertDrill] = {
    "ElasticRingRunFailed": AlertDrill(
        "the user's code raises twice in the same step",
        ("--faults", "raise@step=5,phase=forward; raise@step=5,phase=backward"),
    ),
    "ElasticRingNoProgress": AlertDrill(
        "native code of a member takes the GIL and keeps it, and the limits on hangs are long",
        (*PATIENT, "--faults", "gil@step=60,rank=0"), constants=(("600", "10"),),
    ),
    "ElasticRingDoesNotStart": AlertDrill(
        "every worker is stopped (SIGSTOP) while it starts", plant=planted.stop_starting, after_steps=0
    ),
    "ElasticRingWaitsForCapacity": AlertDrill(
        "one of two nodes is killed, and the run may not have fewer rings",
        ("--dp", "2", "--min-dp", "2"), cpus=(1, 1), plant=planted.kill_second_node,
    ),
    "ElasticRingCoordinatorSilent": AlertDrill(
        "the head is killed, and the coordinator with it", plant=planted.kill_head
    ),
    "ElasticRingDriverSilent": AlertDrill(
        "the driver is stopped (SIGSTOP)", ("--run.timeouts.lease-s", "30"), plant=planted.stop_driver
    ),
    "ElasticRingRecoveryRate": AlertDrill(
        "the user's code raises in eight steps", ("--faults", raising(40, 80, 5))
    ),
    "ElasticRingCommunicationErrors": AlertDrill(
        "the connections between two members are shut down three times", ("--cp", "2"), plant=planted.cut_connections
    ),
    "ElasticRingStepsUndone": AlertDrill(
        "the only holder of a shard is killed, nine steps after a checkpoint",
        ("--cp", "2", "--spares", "1", "--checkpoint-every-steps", "20", "--faults", "kill@step=49,rank=0"),
    ),
    "ElasticRingCheckpointsFail": AlertDrill(
        "a file lies where the checkpoints' folder was",
        ("--checkpoint-every-steps", "20", "--run.timeouts.storage-s", "1"),
        plant=planted.block_checkpoints, constants=(("> 900", "> 15"),),
    ),
    "ElasticRingCheckpointOld": AlertDrill(
        "the run is to save so seldom that nothing is saved",
        ("--checkpoint-every-steps", "1000000"), constants=(("6 * 3600", "20"),),
    ),
    "ElasticRingCoordinatorRestarts": AlertDrill(
        "the coordinator is killed three times", plant=planted.kill_coordinators, speed=20.0
    ),
    "ElasticRingNoSpares": AlertDrill(
        "the run asks for a spare, and the node has no room for one", ("--spares", "1"), cpus=(1,)
    ),
    "ElasticRingFewerRings": AlertDrill(
        "one of two nodes is killed", ("--dp", "2"), cpus=(1, 1), plant=planted.kill_second_node
    ),
    "ElasticRingWorkersDoNotStart": AlertDrill(
        "every spare is killed while it starts", ("--spares", "1"), plant=planted.kill_starting
    ),
    "ElasticRingMemoryPressure": AlertDrill(
        "another process takes 6 % of the node's memory, and the rule's limit is 3 % above what is used now",
        plant=planted.fill_memory, measured=planted.memory_limit,
    ),
    "ElasticRingSkippedSteps": AlertDrill(
        "a learning rate at which the weights overflow", ("--optim.peak-lr", "1000")
    ),
    "ElasticRingExposedWait": AlertDrill(
        "one of a ring's two members is stopped for four fifths of the time",
        (*PATIENT, "--cp", "2"), plant=planted.slow_last_rank, after_steps=50,
    ),
}  # fmt: skip
"""By the alert's name. The others need a GPU or a real network; rules_test.yml has their cases."""
