"""A newcomer's shard lies in memory that holds anything: it is state only once values have come into it, all of them.

Real processes, groups and shards; what is asked is what a member reports, and what the control core makes of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ring.config import RunConfig, ScalingConfig
from elastic_ring.control.decisions.quorum import decide
from elastic_ring.control.messages import Heal, Report
from elastic_ring.errors import ElasticRingError
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.worker.generation_build import heal_over_link
from elastic_ring.runtime.worker.member import Member
from tests.unit.groups.processes import Membership, abort, membership
from tests.unit.train.tiny_task import begin, facts, make_task, rebuild, run_steps

REPLICAS = Mesh(2, 1)
HEAL = Heal(0, "donor", ("newcomer",))


@pytest.fixture(scope="module")
def pair() -> Iterator[Membership]:
    with membership(2) as made:
        yield made


class Struck(RuntimeError):
    """The planned break of a heal."""


def come_empty_or_keep(me: Any, where: Any, newcomer: int) -> None:
    """The next generation, with one rank that is another process as far as its state goes."""
    if me.rank == newcomer:
        me.state.drop()
    rebuild(me, where, REPLICAS, keep=me.rank != newcomer)


def heal(me: Any, role: str, fires: bool) -> str:
    def inject(role: str) -> None:
        if fires:
            raise Struck

    try:
        heal_over_link(HEAL, role, ("donor", "newcomer"), me.state, me.groups, me.connector, inject, {})
    except (Struck, ElasticRingError) as error:
        return type(error).__name__
    return "healed"


def report(me: Any) -> Report:
    worker_spec = SimpleNamespace(worker=f"w{me.rank}", scaling=ScalingConfig(), run=RunConfig(name="r"), task=None)
    member = Member(worker_spec, None, None, lambda records: None)  # type: ignore[arg-type]
    member.parts.warm = SimpleNamespace(transaction=me.state)  # type: ignore[assignment]
    return member.report("c", 1, me.membership_id[1], "aborted")


def holders(pair: Membership) -> dict[str, int]:
    """Who holds which shard by the reports of all, after an abort of a generation that was built at step 0."""
    reports = {told.worker: told for told in pair.all(report)}
    decided = decide(reports, newest_vote=None, committed=0, built_step=0, built_id=(1, 1))
    assert decided.step == 0
    return dict(decided.holders)


def one_that_comes_empty(pair: Membership) -> None:
    pair.all(begin, pair.meeting(), REPLICAS, make_task())
    assert holders(pair) == {"w0": 0, "w1": 0}, "first values from the seed are values"
    pair.all(come_empty_or_keep, pair.meeting(), 1)


def test_one_whose_shard_has_not_come_yet_holds_nothing_though_the_run_stands_at_step_0(pair):
    one_that_comes_empty(pair)
    assert holders(pair) == {"w0": 0}


def test_one_whose_heal_broke_off_holds_nothing(pair):
    one_that_comes_empty(pair)
    pair.start(0, heal, "donor", False)
    assert pair.call(1, heal, "newcomer", True) == "Struck"
    pair.now(0, abort)  # it waits for an answer that does not come, or has seen the connection close
    assert pair.result(0) in ("GroupAborted", "PeerFailed")
    assert holders(pair) == {"w0": 0}


def test_one_that_was_healed_holds_what_its_donor_holds_and_trains_on(pair):
    one_that_comes_empty(pair)
    pair.start(0, heal, "donor", False)
    assert pair.call(1, heal, "newcomer", False) == pair.result(0) == "healed"
    assert holders(pair) == {"w0": 0, "w1": 0}
    pair.all(run_steps, 1)
    digests = [fact["digest"] for fact in pair.all(facts)]
    assert digests[0] == digests[1]
