"""Planned faults: a schedule, parsed from text and checked before the run starts.

    kill@step=21,phase=backward,rank=3; freeze@step=30,rank=0

`rank` is the global rank at the time of the fault; each fault fires once. After `slow` a process stays slow, after
`wrong` it computes every gradient wrongly. `runtime/worker/faults` injects them; no I/O here.
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS = (
    "kill",
    "freeze",
    "gil",
    "raise",
    "exit",
    "drain",
    "kill-node",
    "freeze-node",
    "kill-coordinator",
    "freeze-coordinator",
    "slow",
    "flip",
    "wrong",
    "poison",
)
EXCHANGES = ("dispatch", "combine")
"""Before rows go to their experts, and before results return; in backward before their gradients do."""
PHASES = ("forward", "backward", "reduce", "vote", "update", "apply", "idle", "heal", "upload", "commit", *EXCHANGES)
"""`update`: before each exchange of Muon's. `upload`: in the middle of a rank's file of the checkpoint of `step` steps.
`commit`: in the coordinator, between the last of these files and the manifest."""
WITH_HOPS = ("forward", "backward", "update", *EXCHANGES)
GPU_KINDS = ("poison",)
FLIP_KINDS = ("flip", "wrong")
FLIPPED = ("backward", "reduce", "apply")
"""Phases after which one bit is wrong: of the local gradient, the reduced one, or the state."""
COMMIT_KINDS = ("slow", "kill-coordinator", "freeze-coordinator")
ROLES = ("spare", "donor")


@dataclass(frozen=True)
class Fault:
    """One planned fault. `rank=None`, in phase heal only: any rank with that `role`. `hop`: number of the ring's hop,
    or of the exchange of experts or of the update in the step."""

    kind: str
    step: int
    phase: str = "idle"
    rank: int | None = None
    hop: int | None = None
    role: str | None = None

    def __str__(self) -> str:
        parts = [f"step={self.step}", f"phase={self.phase}"]
        parts += [f"{k}={v}" for k in ("rank", "hop", "role") if (v := getattr(self, k)) is not None]
        return f"{self.kind}@{','.join(parts)}"

    def matches(self, *, step: int, phase: str, rank: int, hop: int | None = None, role: str | None = None) -> bool:
        """Whether this fault is planned for this step, phase and rank."""
        return (
            (self.step, self.phase) == (step, phase)
            and self.rank in (None, rank)
            and (self.hop is None or self.hop == hop)
            and (self.role is None or self.role == role)
        )


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Parse a schedule; `none` or an empty text gives no faults. Raises: ValueError naming the wrong part."""
    if text.strip() in ("", "none"):
        return ()
    return tuple(_parse(part.strip()) for part in text.split(";") if part.strip())


def _parse(part: str) -> Fault:
    kind, _, rest = part.partition("@")
    if kind not in KINDS:
        raise ValueError(f"faults: unknown fault {kind!r} in {part!r}; known: {', '.join(KINDS)}")
    fields: dict[str, str] = {}
    for item in filter(None, (p.strip() for p in rest.split(","))):
        key, equals, value = item.partition("=")
        if not equals or key not in ("step", "phase", "rank", "hop", "role"):
            raise ValueError(f"faults: cannot read {item!r} in {part!r}; use step=, phase=, rank=, hop=, role=")
        fields[key] = value
    if "step" not in fields:
        raise ValueError(f"faults: {part!r} names no step; write {kind}@step=N,...")
    phase = fields.get("phase", "idle")
    if phase not in PHASES:
        raise ValueError(f"faults: unknown phase {phase!r} in {part!r}; known: {', '.join(PHASES)}")
    if kind in FLIP_KINDS and phase not in FLIPPED:
        raise ValueError(f"faults: {kind} in {part!r} needs phase=backward, phase=reduce or phase=apply")
    if phase == "commit" and kind not in COMMIT_KINDS:
        raise ValueError(f"faults: {part!r}: phase=commit is the coordinator's; use {', '.join(COMMIT_KINDS)}")
    role = fields.get("role")
    if role is not None and (role not in ROLES or phase != "heal"):
        raise ValueError(f"faults: role={role!r} in {part!r}; use role=spare or role=donor, with phase=heal")
    hop = _number(fields, "hop", part)
    if hop is not None and phase not in WITH_HOPS:
        raise ValueError(f"faults: hop={hop} in {part!r} needs phase={', '.join(WITH_HOPS)}")
    rank = _number(fields, "rank", part)
    if rank is None and phase != "heal":
        rank = 0
    step = _number(fields, "step", part)
    assert step is not None
    return Fault(kind, step, phase, rank, hop, role)


def _number(fields: dict[str, str], key: str, part: str) -> int | None:
    if key not in fields:
        return None
    if not fields[key].isdecimal():
        raise ValueError(f"faults: {key}={fields[key]!r} in {part!r} must be a whole number of at least 0")
    return int(fields[key])
