"""A corpus that grows, in the control core: a longer manifest holds from a build on, for newcomers as well."""

from __future__ import annotations

from elastic_ring.control.messages import Build, CorpusGrew, CorpusRecalled, CorpusVersion, Stop
from elastic_ring.control.state import members
from tests.sim.bench import Bench, build_in, only

NODES = {"a": 3, "b": 3}
FIRST, LAST = CorpusGrew("c", "x/manifest-8.json", "8"), CorpusGrew("c", "x/manifest.json", "all")


def at(step: int, grown: CorpusGrew) -> CorpusVersion:
    return CorpusVersion(step, grown.uri, grown.digest)


def test_a_longer_manifest_holds_from_the_boundary_that_it_asks_for() -> None:
    run = Bench(NODES).form()
    run.commit(0)
    run.handle(FIRST)
    assert "boundary asked for: more of the corpus" in run.reason
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
