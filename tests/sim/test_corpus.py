"""A corpus that grows, in the control core: a longer manifest holds from a build on, for newcomers as well."""

from __future__ import annotations

import json

from elastic_ring.control.decisions.data_order import journalled, take_facts
from elastic_ring.control.messages import (
    Build,
    Checkpoint,
    CheckpointsKnown,
    CorpusGrew,
    CorpusRecalled,
    CorpusVersion,
    EndRun,
    Stop,
)
from elastic_ring.control.state import members
from elastic_ring.mesh import Mesh
from tests.sim.bench import Bench, build_in, only

NODES = {"a": 3, "b": 3}
STORED = CheckpointsKnown("k", (Checkpoint(2, "step-2", Mesh(2, 2)),))
FIRST, LAST = CorpusGrew("c", "x/manifest-8.json", "8"), CorpusGrew("c", "x/manifest.json", "all")


def at(step: int, grown: CorpusGrew) -> CorpusVersion:
    return CorpusVersion(step, grown.uri, grown.digest)


def test_a_longer_manifest_holds_from_the_boundary_that_it_asks_for() -> None:
    run = Bench(NODES).form()
    run.commit(0)
    run.handle(FIRST)
    assert "requested a boundary: more of the corpus" in run.reason
    builds = only(Build, run.report_all(2, kind="boundary"))
    assert [build.worker for build in builds] == list(members(run.state))
    assert {(build.step, build.corpus) for build in builds} == {(2, (at(2, FIRST),))}
    run.resume_all()
    assert run.state.grown is None
    assert run.change.promise == "bit-exact"
    run.commit(2)
    run.lose(3)
    build = build_in(run.report_all(3))
    assert build.heals
    assert build.corpus == (at(2, FIRST),)


def test_a_manifest_that_is_found_before_the_first_step_waits_for_the_second() -> None:
    run = Bench(NODES).form()
    assert not only(Stop, run.handle(FIRST))
    run.lose(0)
    assert build_in(run.report_all(0)).corpus == ()
    run.resume_all()
    run.commit(0)
    assert run.state.grown == FIRST
    assert "more of the corpus" in run.reason


def test_a_recovery_is_a_boundary_too_and_only_the_longest_manifest_counts() -> None:
    run = Bench(NODES).form()
    run.commit(0)
    run.handle(FIRST)
    run.handle(LAST)
    run.lose(0)
    assert build_in(run.report_all(1)).corpus == (at(1, LAST),)


def test_the_versions_of_a_checkpoint_stand_and_new_ones_follow_them() -> None:
    run = Bench(NODES).form()
    run.handle(CorpusRecalled("c", (at(3, FIRST),)))
    run.commit(0)
    run.handle(LAST)
    run.lose(0)
    assert build_in(run.report_all(1)).corpus == (at(3, FIRST),)
    run.resume_all()
    for step in range(1, 4):
        run.commit(step)
    run.lose(1)
    assert build_in(run.report_all(4)).corpus == (at(3, FIRST), at(4, LAST))


def trained(run: Bench, steps: range) -> Bench:
    for step in steps:
        run.commit(step)
    return run


def gone_back() -> Bench:
    """A run that has committed five steps, and lost every holder of a shard: it begins again at step 2."""
    run = trained(Bench(NODES, spares=0).form(), range(5))
    run.handle(STORED)
    run.handle(FIRST)
    run.lose(1, 3)  # all that hold cp_rank 1
    run.report_all(5)
    run.all_ready()
    return run


def test_steps_that_run_again_keep_their_manifest_though_a_longer_one_is_there_already() -> None:
    run = gone_back()
    assert (run.change.step, run.state.reached, run.state.corpus) == (2, 5, ())
    run.resume_all()
    for step in (2, 3):
        run.commit(step)
        assert "more of the corpus" not in run.reason
    run.lose(0)
    assert build_in(run.report_all(4)).corpus == (), "step 4 was committed with the first manifest"
    run.resume_all()
    run.commit(4)
    assert "more of the corpus" in run.reason
    assert build_in(run.report_all(5, kind="boundary")).corpus == (at(5, FIRST),)


def test_a_run_that_is_submitted_again_meets_what_its_journal_tells_at_the_same_steps() -> None:
    first = trained(Bench(NODES).form(), range(4))
    first.handle(FIRST)
    first.report_all(4, kind="boundary")
    lines = [{"note": "begin"}, *map(json.loads, first.journal)]
    assert journalled(lines)[0] == (at(4, FIRST),)
    assert journalled([{"note": "begin", "corpus": [vars(at(4, FIRST))]}])[0] == (at(4, FIRST),), "it came to no build"
    again = Bench(NODES)
    again.handle(STORED)
    again.handle(CorpusRecalled("c", journalled(lines)[0], num_steps=7))
    again.handle(LAST)
    again.form()
    assert again.state.phase.membership.step == 2  # type: ignore[union-attr]
    for step in range(2, 6):
        again.commit(step)
        assert not only(Stop, again.sent), "no boundary among the steps that ran before"
    again.commit(6)
    assert build_in(again.report_all(7, kind="boundary")).corpus == (at(4, FIRST), at(7, LAST))


def test_the_end_of_a_crash_loop_has_the_manifests_by_which_its_batch_is_named() -> None:
    run = trained(Bench(NODES, spares=2).form(), range(2))
    run.handle(FIRST)
    run.report_all(2, kind="boundary")
    for _ in range(3):
        run.resume_all()
        run.lose(3, step=2, phase="forward", signal="SIGSEGV")
        run.all_ready()
        sent = run.report_all(2)
    (end,) = only(EndRun, sent)
    assert end.error == "CrashLoop"
    assert take_facts(dict(end.facts))[0] == (at(2, FIRST),)
