"""Terms in a run's storage: each is claimed once, one that stands replaces whoever is older, and that one is told."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ring.cli import train
from elastic_ring.config import CheckpointConfig, RunConfig
from elastic_ring.control.decisions.detectors import LEAST_S, CheckpointWatch
from elastic_ring.control.decisions.terms import LONGEST_TURN_S, TermClaim, Unanswered
from elastic_ring.errors import CoordinatorLost, RunFailed, StaleMessage, StorageFailed, TermLost
from elastic_ring.monitor.journal import Journal
from elastic_ring.monitor.json_files import json_bytes
from elastic_ring.runtime import run_storage
from elastic_ring.runtime.coordinator.inbox import News
from elastic_ring.runtime.coordinator.startup import begin_note, open_run
from elastic_ring.runtime.driver.follow import CoordinatorLink, Follower
from elastic_ring.runtime.terms import TermGuard, Terms, TermWatch
from tests.unit.coordinator.test_startup import begun, opened, run_spec


def of(folder: Path, fail_after_s: float = 3600.0) -> RunConfig:
    return RunConfig("run", run_dir=str(folder), checkpoint_config=CheckpointConfig(fail_after_s=fail_after_s))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "terms").iterdir())


def test_terms_count_up_past_gaps_strangers_and_claims_that_are_void(tmp_path):
    terms = Terms(of(tmp_path))
    assert [terms.claim("a").term for _ in range(3)] == [1, 2, 3]
    (tmp_path / "terms" / "000009").touch()
    (tmp_path / "terms" / "notes.txt").touch()
    assert terms.newest() == TermClaim(9)
    own = terms.claim("a")
    assert (own.term, terms.newest()) == (10, own)
    terms.withdraw(own)
    assert (terms.newest(), terms.claim("b").term) == (TermClaim(9), 11)
    assert Terms(of(tmp_path)).newest().attempt == "b"


def test_a_number_that_somebody_has_claimed_since_the_look_is_not_claimed_and_not_voided(tmp_path):
    """The claims were removed in between, so that two submissions have held the same number."""
    first, second = Terms(of(tmp_path)), Terms(of(tmp_path))
    own = first.claim("a")
    shutil.rmtree(tmp_path / "terms")
    assert second.claim("b").term == own.term == 1
    first.withdraw(own)
    assert files(tmp_path) == ["000001"]
    assert (first.claim("a").term, second.claim("b")) == (2, None)


def test_processes_that_claim_at_once_never_share_a_term(tmp_path):
    script = (
        "import json, sys\nfrom elastic_ring.config import RunConfig\nfrom elastic_ring.runtime.terms import Terms\n"
        "terms = Terms(RunConfig('run', run_dir=sys.argv[1]))\nsys.stdin.readline()\n"
        "claims = [terms.newest() and terms.claim('a') for _ in range(30)]\n"
        "print(json.dumps([claim.term for claim in claims if claim]))\n"
    )
    claimers = [
        subprocess.Popen(
            [sys.executable, "-c", script, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for claimer in claimers:
        assert claimer.stdin is not None
        claimer.stdin.write("go\n")
        claimer.stdin.flush()
    claimed = [json.loads(claimer.communicate()[0]) for claimer in claimers]
    assert sorted(term for terms in claimed for term in terms) == list(range(1, 1 + sum(map(len, claimed))))
    assert min(map(len, claimed)) > 0


def test_a_coordinator_of_a_lost_run_that_is_started_again_claims_nothing(tmp_path):
    begun(tmp_path, "a")
    opened(run_spec(tmp_path, "a"), is_restart=True)
    opened(run_spec(tmp_path, "b"))
    before = files(tmp_path)
    with pytest.raises(TermLost, match=r"run opened in .* has claimed term 3, .*submit this command again") as lost:
        opened(run_spec(tmp_path, "a"), is_restart=True)
    assert files(tmp_path) == before == ["000002", "000003"], "the journal is of term 1"
    assert lost.value.facts["host"] in lost.value.message
    assert lost.value.facts["host"]


def test_a_submission_whose_first_coordinator_died_before_its_claim_is_not_lost_to_those_before_it(tmp_path):
    """A run that is resumed: the newest claim is of the submission before."""
    opened(run_spec(tmp_path, "before"))
    run = of(tmp_path)
    with pytest.raises(CoordinatorLost, match="Submit the same command again"):
        CoordinatorLink(run, "127.0.0.1:1", "a").raise_gone(RuntimeError("it died"))
    assert opened(run_spec(tmp_path, "a"), is_restart=True).claim.attempt == "a"
    Terms(run).claim("later")
    with pytest.raises(TermLost, match="has claimed term 3"):
        CoordinatorLink(run, "127.0.0.1:1", "a").raise_gone(RuntimeError("it died"))


def test_a_driver_gives_up_on_coordinators_of_which_none_begins(tmp_path):
    link, starting, begun = CoordinatorLink(of(tmp_path), "127.0.0.1:1", "a"), News(phase="starting"), News(phase="x")
    for news, now in ((starting, 1.0), (begun, 3600.0), (starting, 4000.0), (starting, 7660.0)):
        link._refuse_starts({**news, "ended": None}, now)
    with pytest.raises(CoordinatorLost, match=r"no coordinator of run .* has begun for 3660 s \(timeouts\.lease_s and"):
        link._refuse_starts({**starting, "ended": None}, 7661.0)


def test_a_coordinator_that_is_refused_once_it_has_claimed_voids_its_claim(tmp_path, monkeypatch):
    """Another one ends the run between the two questions."""
    looks = []

    def fetch(*_: object, **__: object) -> None:
        looks.append(None)
        if len(looks) == 2:
            (tmp_path / "summary.json").write_bytes(json_bytes({"steps": 1}))

    own = Terms(of(tmp_path)).claim("other")
    monkeypatch.setattr(run_storage, "fetch", fetch)
    with pytest.raises(RunFailed, match="has finished"):
        opened(run_spec(tmp_path, "a"))
    assert files(tmp_path) == ["000001", "000002", "000002.withdrawn"]
    assert Terms(of(tmp_path)).newest() == own


def test_whoever_looks_is_told_of_a_newer_term_by_name_unless_it_is_void_or_of_the_same_submission(tmp_path):
    terms = Terms(of(tmp_path))
    watch = TermWatch(of(tmp_path), terms.claim("a"), terms)
    watch.look()
    (tmp_path / "terms" / "000002").touch()
    for ask in (watch.check, watch.look):
        with pytest.raises(
            TermLost, match=r"somebody .terms/000002 names no host. has claimed term 2, this submission"
        ):
            ask()
    (tmp_path / "terms" / "000002.withdrawn").touch()
    assert not terms.follows(1), "a void claim asks for no listing at each step"
    watch = TermWatch(of(tmp_path), TermClaim(1, "a"), terms)
    watch.check()
    watch.look()
    Terms(of(tmp_path)).claim("a")
    with pytest.raises(StaleMessage, match="newer coordinator of this submission has term 3"):
        watch.check()


@pytest.mark.parametrize("claimed_again", [False, True])
def test_a_claim_that_is_gone_or_somebody_elses_is_a_lost_term_and_the_next_one_is_above_the_journals(
    tmp_path, claimed_again
):
    """A purge of the storage removed it; two that claim the same number must not both go on."""
    own = opened(run_spec(tmp_path, "a")).claim
    terms = Terms(of(tmp_path))
    watch, left = TermWatch(of(tmp_path), own, terms), list[int]()
    watch.look()
    journal = tmp_path / "journal.jsonl"
    with Journal(journal) as lines:
        lines.append(begin_note(run_spec(tmp_path, "a"), 0.0))
        lines.append({"note": "term", "term": 7, "num_lines": 1})
    (tmp_path / "terms" / "000001").unlink()
    if claimed_again:
        assert Terms(of(tmp_path)).claim("b").term == own.term
    problem = "is .*'s now, since 2" if claimed_again else "was removed, so"
    with pytest.raises(TermLost, match=problem):
        watch.look()
    with pytest.raises(TermLost, match=problem):
        watch.check()
    TermGuard(of(tmp_path), lambda: own, lambda timeout_s: False, left.append).look(TermClaim(1, "a"))
    assert left == [3]
    assert opened(run_spec(tmp_path, "c")).claim.term == 8
    assert not journal.exists(), "it is set aside"
    shutil.rmtree(tmp_path / "terms")
    with pytest.raises(StorageFailed, match="neither this run's journal nor its term"):
        watch.look()


def takes_it(folder: Path) -> None:
    Terms(of(folder)).claim("b")


def purges(folder: Path) -> None:
    shutil.rmtree(folder / "terms")


def purges_and_takes_it(folder: Path) -> None:
    purges(folder)
    takes_it(folder)


def is_told_by_its_watch(folder: Path, lose: Callable[[Path], object]) -> None:
    """As a coordinator's deciding thread is, whose look is another thread's."""
    terms = Terms(of(folder))
    watch = TermWatch(of(folder), terms.claim("a"), terms)
    lose(folder)
    with suppress(TermLost):
        watch.look()
    watch.check()


def is_started_again(folder: Path, lose: Callable[[Path], object]) -> None:
    """The other submission's journal is in the folder, and its clock is far behind."""
    opened(run_spec(folder, "a"))
    lose(folder)
    with Journal(folder / "journal.jsonl") as lines:
        lines.append({"term": 2, **begin_note(run_spec(folder, "b"), now=1.5e9)})
    opened(run_spec(folder, "a"), is_restart=True)


def begins_beside_it(folder: Path, lose: Callable[[Path], object]) -> None:
    """Between its own claim and its second look."""
    terms, none = Terms(of(folder)), list[str]
    claim = terms.claim
    terms.claim = lambda *claimed, **above: (claim(*claimed, **above), lose(folder))[0]  # type: ignore[method-assign]
    open_run(run_spec(folder, "a"), terms, is_restart=False, remaining=none, clear=none)


def claims_after_it(folder: Path, lose: Callable[[Path], object]) -> None:
    """Frozen between its look and its claim."""
    terms, none = Terms(of(folder)), list[str]
    terms.claim("before")
    claim = terms.claim
    terms.claim = lambda *claimed, **above: (lose(folder), claim(*claimed, **above))[1]  # type: ignore[method-assign]
    open_run(run_spec(folder, "a"), terms, is_restart=False, remaining=none, clear=none)


def loses_its_coordinator(folder: Path, lose: Callable[[Path], object]) -> None:
    link = CoordinatorLink(of(folder), "127.0.0.1:1", "a")
    link._own = replace(Terms(of(folder)).claim("a"), host="", id="")
    lose(folder)
    link.raise_gone(RuntimeError("it died"))


def ends_as_its_coordinator_says(folder: Path, lose: Callable[[Path], object]) -> None:
    """What a coordinator released crosses to the driver as text and facts."""
    try:
        is_told_by_its_watch(folder, lose)
    except TermLost as lost:
        end: Any = {"error": "TermLost", "message": lost.message, "facts": lost.facts}
        follower: Any = SimpleNamespace(_submission=SimpleNamespace(task=None))
        Follower.result(follower, end)


WAYS = (is_told_by_its_watch, is_started_again, loses_its_coordinator, ends_as_its_coordinator_says)
LOSSES = (takes_it, purges, purges_and_takes_it)


@pytest.mark.parametrize(
    ("way", "lose"), [(begins_beside_it, takes_it), (claims_after_it, takes_it), *itertools.product(WAYS, LOSSES)]
)
def test_whichever_way_a_run_loses_its_term_it_ends_with_3_and_one_line_of_host_term_time_and_the_way_out(
    tmp_path, monkeypatch, capsys, way, lose
):
    (tmp_path / "journal.jsonl").touch()
    monkeypatch.setattr(train, "parse", lambda argv: way(tmp_path, lose))
    assert train.main([]) == 3
    printed = capsys.readouterr().err
    host = socket.gethostname()
    if way is is_started_again and lose is not takes_it:
        reason = f"{host} has claimed term 2, since 2017-07-14 02:40:00 UTC by its clock, "
    elif lose is takes_it:
        reason = f"{host} has claimed term 2, since 2"
    else:
        reason = "its claim terms/000001 .*" + (f"is {host}'s now, since 2" if lose is purges_and_takes_it else "was")
    line = rf"elastic-ring train: run \w+ in {tmp_path} is not this submission's any more: {reason}.*submit this.*\n"
    assert re.fullmatch(line, printed), printed


def test_rank_0_without_a_coordinator_ends_with_3_where_the_run_is_lost_or_nobody_can_tell(tmp_path):
    left: list[int] = []
    own = Terms(of(tmp_path)).claim("a")
    Terms(of(tmp_path)).claim("a")
    guard = TermGuard(of(tmp_path), lambda: own, lambda timeout_s: False, left.append)
    guard.look(own)
    assert left == [], "its own submission's next coordinator begins"
    Terms(of(tmp_path)).claim("b")
    guard.look(own)
    assert left == [3]
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "terms").write_text("no folder")
    with pytest.raises(StorageFailed):
        Terms(of(tmp_path / "gone")).newest()
    guard = TermGuard(of(tmp_path / "gone", fail_after_s=1e-9), lambda: own, lambda timeout_s: False, left.append)
    guard.look(own)
    assert left == [3], "it has only just begun to ask"
    guard.look(own)
    assert left == [3, 3]


def test_silence_is_counted_in_turns_so_that_a_frozen_process_asks_before_it_gives_up():
    silence = Unanswered()
    assert [silence.tick(at_s, is_heard=False) for at_s in (0.0, 0.5, 1.0)] == [0.0, 0.5, 1.0]
    assert silence.tick(5000.0, is_heard=False) == 1.0 + LONGEST_TURN_S
    assert silence.tick(5000.5, is_heard=True) == 0.0


def test_intervals_without_a_checkpoint_are_counted_in_training_alone_and_told_at_each_doubling():
    by_time = CheckpointWatch(None, 60.0)
    told = []
    for number in range(400):  # a step each second, after the 100th an hour in which nothing trains
        by_time.observe(number + 1, number + 3600.0 * (number > 100))
        told += [num] if (num := by_time.take_report()) else []
    assert (told, by_time.num_intervals) == ([3, 6], 7)
    assert by_time.overdue_s == pytest.approx(5 * 60, abs=60)
    by_time.restart(400)
    assert (by_time.num_intervals, by_time.overdue_s, by_time.take_report()) == (0, 0.0, 0)
    by_steps = CheckpointWatch(5, 60.0)
    quick = [by_steps.observe(applied, applied * 0.1) for applied in range(1, 200)]
    assert (len(quick) * 0.1 < LEAST_S, by_steps.num_intervals) == (True, 0), "a write takes longer than these steps"
    by_steps.observe(400, 40.0)
    assert by_steps.num_intervals == 80
    never = CheckpointWatch(0, 60.0)
    never.observe(1, 0.0)
    never.observe(2, 50.0)
    assert never.num_intervals == 0
