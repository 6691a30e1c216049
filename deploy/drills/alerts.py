"""The alerts of deploy/monitoring/rules.yml that a laptop can provoke: what is planted in which run. A table only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.drills import planted

Constants = tuple[tuple[str, str], ...]

SMALL = (
    "--preset",
    "laptop",
    "--dp",
    "1",
    "--cp",
    "1",
    "--spares",
    "0",
    "--context",
    "256",
    "--global-batch",
    "2",
    "--steps",
    "1000000",
    "--checkpoint-every-steps",
    "0",
    "--cpus-per-worker",
    "1",
)
"""The run of every drill; what a drill adds wins."""
PATIENT = (
    "--run.timeouts.stopped-s",
    "90",
    "--run.timeouts.heart-floor-s",
    "100",
    "--run.timeouts.heart-cap-s",
    "110",
    "--run.timeouts.heart-computing-s",
    "115",
    "--run.timeouts.report-s",
    "120",
    "--run.timeouts.build-s",
    "150",
)
"""A hang stays for longer than the drill: the run would end it by itself after seconds."""


@dataclass(frozen=True)
class AlertDrill:
    """`plants`: the fault, in words. `train`: settings of the run, beside SMALL. `cpus` of each node. `plant` is called
    after `after_steps` steps. `prepare` makes what the run needs in a folder, and returns further settings. The rule's
    durations are divided by `speed`; `constants` are replaced in it, and those that `measured` gives while the run
    trains.
    """

    plants: str
    train: tuple[str, ...] = ()
    cpus: tuple[int, ...] = (4,)
    plant: Callable[[planted.Scene], None] | None = None
    after_steps: int = 5
    speed: float = 60.0
    constants: Constants = ()
    prepare: Callable[[Path], tuple[str, ...]] | None = None
    measured: Callable[[], Constants] | None = None
    gpus: int = 0
    """How many the run needs; `all` leaves the drill out where there are fewer."""


def raising(first: int, last: int, every: int) -> str:
    """A schedule in which the user's code raises once in each of these steps."""
    return "; ".join(f"raise@step={step},phase=forward" for step in range(first, last, every))


ON_GPUS = ("--scaling.device", "cuda", "--step.param-dtype", "bfloat16")
POISONED = "ever longer stretches of steps get noise in place of text"
STEADY_RATE = ("--optim.peak-lr", "0.001", "--optim.min-lr", "0.001")

DRILLS: Mapping[str, AlertDrill] = {
    "ElasticRingRunFailed": AlertDrill(
        "the user's code raises twice in the same step",
        ("--faults", "raise@step=5,phase=forward; raise@step=5,phase=backward"),
    ),
    "ElasticRingNoProgress": AlertDrill(
        "native code of a member takes the GIL and keeps it, and the limits on hangs are long",
        (*PATIENT, "--faults", "gil@step=200,rank=0"),
        plant=planted.nothing_more,
        after_steps=199,
        constants=(("600", "30"),),
    ),
    "ElasticRingDoesNotStart": AlertDrill(
        "every worker is stopped (SIGSTOP) while it starts", plant=planted.stop_starting, after_steps=0
    ),
    "ElasticRingWaitsForCapacity": AlertDrill(
        "one of two nodes is killed, and the run may not have fewer rings",
        ("--dp", "2", "--min-dp", "2"),
        cpus=(1, 1),
        plant=planted.kill_second_node,
    ),
    "ElasticRingCoordinatorSilent": AlertDrill(
        "the head is killed, and the coordinator with it", plant=planted.kill_head
    ),
    "ElasticRingDriverSilent": AlertDrill(
        "the driver is stopped (SIGSTOP)", ("--run.timeouts.lease-s", "30"), plant=planted.stop_driver
    ),
    "ElasticRingSlowSteps": AlertDrill(
        "the only member is stopped for four fifths of the time, after more than a minute at its pace",
        PATIENT,
        plant=planted.slow_after_a_while,
        speed=30.0,
        # Else the rule is silent for as long as the mesh is new.
        constants=(('(ray_elastic_ring_mesh{part="dp"})[6h:1m]', '(ray_elastic_ring_mesh{part="dp"})[10m:1m]'),),
    ),
    "ElasticRingRecoveryRate": AlertDrill("the user's code raises in eight steps", ("--faults", raising(40, 80, 5))),
    "ElasticRingCommunicationErrors": AlertDrill(
        "the connections between two members are shut down three times", ("--cp", "2"), plant=planted.cut_connections
    ),
    "ElasticRingStepsUndone": AlertDrill(
        "the only holder of a shard is killed, nine steps after a checkpoint",
        (
            "--cp",
            "2",
            "--spares",
            "1",
            "--copies",
            "0",
            "--checkpoint-every-steps",
            "20",
            "--faults",
            "kill@step=49,rank=0",
        ),
    ),
    "ElasticRingCheckpointsFail": AlertDrill(
        "a file lies where the checkpoints' folder was",
        ("--checkpoint-every-steps", "20", "--run.timeouts.storage-s", "1"),
        plant=planted.block_checkpoints,
        constants=(("> 900", "> 15"),),
    ),
    "ElasticRingCheckpointsOverdue": AlertDrill(
        "a file lies where the checkpoints' folder was",
        ("--checkpoint-every-steps", "20", "--run.timeouts.storage-s", "1"),
        plant=planted.block_checkpoints,
        speed=30.0,
    ),
    "ElasticRingCheckpointOld": AlertDrill(
        "the run is to save so seldom that nothing is saved",
        ("--checkpoint-every-steps", "1000000"),
        constants=(("6 * 3600", "20"),),
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
    "ElasticRingGoodputLow": AlertDrill(
        "the user's code raises once in every step",
        ("--faults", raising(60, 4000, 1)),
        constants=(("/ 3600", "/ 60"),),
    ),
    "ElasticRingMemoryPressure": AlertDrill(
        "another process takes 6 % of the node's memory, and the rule's limit is 3 % above what is used now",
        plant=planted.fill_memory,
        measured=planted.memory_limit,
    ),
    "ElasticRingSkippedSteps": AlertDrill("a learning rate at which the weights overflow", ("--optim.peak-lr", "1000")),
    "ElasticRingLossSpikes": AlertDrill(POISONED, STEADY_RATE, prepare=planted.poisoned_words),
    "ElasticRingStraggler": AlertDrill(
        "one of two rings' members becomes slow, and stays so",
        ("--dp", "2", "--run.straggler-window-s", "15", "--faults", "slow@step=200,rank=1"),
    ),
    "ElasticRingWrongResult": AlertDrill(
        "one bit of a member's local gradient is wrong, in three steps; a spare takes its place each time",
        (
            "--dp",
            "2",
            "--spares",
            "1",
            "--run.corruption",
            "act",
            "--run.corruption-every-steps",
            "10",
            "--faults",
            "flip@step=209,phase=backward,rank=1; flip@step=409,phase=backward,rank=1; "
            "flip@step=609,phase=backward,rank=1",
        ),
    ),
    "ElasticRingLossAnomaly": AlertDrill(POISONED, STEADY_RATE, prepare=planted.poisoned_words),
    "ElasticRingGradientAnomaly": AlertDrill(POISONED, STEADY_RATE, prepare=planted.poisoned_sentence),
    "ElasticRingExposedWait": AlertDrill(
        "one of a ring's two members is stopped for four fifths of the time",
        (*PATIENT, "--cp", "2"),
        plant=planted.slow_last_rank,
        after_steps=50,
    ),
    "ElasticRingDataWait": AlertDrill(
        "the corpus comes from a server that takes half a second for each part, and is more than a worker keeps of it",
        prepare=planted.slow_corpus,
    ),
    "ElasticRingHopLatency": AlertDrill(
        "one of a ring's two members is stopped for four fifths of the time, after more than a minute at its pace",
        (*PATIENT, *ON_GPUS, "--cp", "2"),
        plant=planted.slow_after_a_while,
        gpus=2,
    ),
    "ElasticRingDeviceFails": AlertDrill(
        "a kernel's failed assertion leaves a member no use of its GPU; a spare takes its place and its GPU",
        (*ON_GPUS, "--spares", "1", "--checkpoint-every-steps", "20", "--faults", "poison@step=500,phase=forward"),
        plant=planted.nothing_more,
        gpus=1,
    ),
    "ElasticRingDeviceHot": AlertDrill(
        "a process computes at full load, and the rule's limit is 3 degrees above what the hottest GPU has now",
        plant=planted.heat_gpu,
        measured=planted.heat_limit,
        gpus=1,
    ),
}
"""By the alert's name. The others, of a GPU that is slowed down or about to fail, are nothing that a process can cause;
rules_test.yml has their cases."""
