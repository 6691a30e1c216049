"""A schedule of faults is text: what can be read means one thing, what cannot is refused by name."""

from __future__ import annotations

import pytest

from elastic_ring.faults import COMMIT_KINDS, FLIP_KINDS, FLIPPED, KINDS, PHASES, Fault, parse_faults


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", ()),
        ("  ", ()),
        ("none", ()),
        (";;", ()),
        ("kill@step=21,phase=backward,rank=3", (Fault("kill", 21, "backward", 3),)),
        ("freeze@step=30,rank=0", (Fault("freeze", 30, "idle", 0),)),
        ("kill@step=0", (Fault("kill", 0, "idle", 0),)),
        ("exit@step=6,phase=forward,hop=0,rank=3", (Fault("exit", 6, "forward", 3, 0),)),
        ("kill@step=5,phase=heal,role=donor", (Fault("kill", 5, "heal", None, None, "donor"),)),
        ("kill@step=5,phase=heal", (Fault("kill", 5, "heal"),)),
        (
            " kill@step=1 , rank=1 ;drain@rank=2,step=2; ",
            (Fault("kill", 1, "idle", 1), Fault("drain", 2, "idle", 2)),
        ),
    ],
)
def test_a_schedule_reads_as_it_is_meant(text: str, faults: tuple[Fault, ...]) -> None:
    assert parse_faults(text) == faults


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        (k, p)
        for k in KINDS
        for p in PHASES
        if (k not in FLIP_KINDS or p in FLIPPED) and (p != "commit" or k in COMMIT_KINDS)
    ],
)
def test_what_is_printed_reads_back_as_the_same_fault(kind: str, phase: str) -> None:
    (fault,) = parse_faults(f"{kind}@step=7,phase={phase}")
    assert parse_faults(str(fault)) == (fault,)
    hops = [Fault(kind, 7, phase, 2, 1)] if phase in ("forward", "backward") else []
    roles = [Fault(kind, 7, phase, None, None, "spare"), Fault(kind, 7, phase, 3, None, "donor")]
    for other in (*hops, *(roles if phase == "heal" else [])):
        assert parse_faults(str(other)) == (other,)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("burn@step=1", "unknown fault 'burn' in 'burn@step=1'; known: kill, freeze"),
        ("kill", "'kill' names no step; write kill@step=N"),
        ("kill@rank=3", "'kill@rank=3' names no step"),
        ("kill@step=1,when=now", r"cannot read 'when=now' in .*; use step=, phase=, rank=, hop=, role="),
        ("kill@step=1,rank", "cannot read 'rank'"),
        ("kill@step=one", "step='one' in 'kill@step=one' must be a whole number of at least 0"),
        ("kill@step=-1", "step='-1'"),
        ("kill@step=1.5", r"step='1\.5'"),
        ("kill@step=²", "step='²' .* must be a whole number"),
        ("kill@step=", "step=''"),
        ("kill@step=1,rank=x", "rank='x'"),
        ("kill@step=1,phase=commit", "phase=commit is the coordinator's; use slow, kill-coordinator"),
        ("kill@step=1,phase=lunch", "unknown phase 'lunch' in .*; known: forward, backward, reduce"),
        ("kill@step=1,phase=heal,role=nurse", "role='nurse' in .*; use role=spare or role=donor"),
        ("kill@step=1,phase=vote,role=donor", "role='donor' in .* with phase=heal"),
        ("kill@step=1,phase=vote,hop=1", "hop=1 in .* needs phase=forward, backward, dispatch, combine"),
        ("flip@step=1,phase=idle", "flip in 'flip@step=1,phase=idle' needs phase=backward"),
        ("wrong@step=1,phase=vote", "wrong in 'wrong@step=1,phase=vote' needs phase=backward"),
        ("kill@step=1,hop=1", "hop=1 in .* needs phase=forward, backward, dispatch, combine"),
        ("kill@step=1; freeze@step=2,rank=a", "rank='a' in 'freeze@step=2,rank=a'"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_part_that_is_wrong(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=f"^faults: .*{named}"):
        parse_faults(text)


def test_a_fault_matches_its_own_moment_only() -> None:
    fault = Fault("kill", 3, "forward", 1, 0)
    assert fault.matches(step=3, phase="forward", rank=1, hop=0)
    assert not fault.matches(step=4, phase="forward", rank=1, hop=0)
    assert not fault.matches(step=3, phase="backward", rank=1, hop=0)
    assert not fault.matches(step=3, phase="forward", rank=0, hop=0)
    assert not fault.matches(step=3, phase="forward", rank=1, hop=1)
    assert not fault.matches(step=3, phase="forward", rank=1)


def test_a_fault_without_hop_or_rank_matches_any() -> None:
    assert all(Fault("kill", 3, "forward", 1).matches(step=3, phase="forward", rank=1, hop=h) for h in (0, 1, None))
    heal = Fault("kill", 3, "heal", None, None, "spare")
    assert heal.matches(step=3, phase="heal", rank=2, role="spare")
    assert not heal.matches(step=3, phase="heal", rank=2, role="donor")
