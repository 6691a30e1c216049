"""No proof by tautology: bugs are planted in the real code, and the comparisons that other tests rest on must fail.

For samples: the digest of what committed steps consumed. For bits: `weights_sha256`, as the end of a run computes
it. Each planted run is compared with a clean one that goes the same way. The third kind, bytes against the
schedule, is in `test_attention_bytes.py`: a hop that is sent twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from elastic_ring.data.loader import samples_text
from elastic_ring.mesh import Mesh
from elastic_ring.state.shard import Shard
from elastic_ring.state.transfer import receive_shard, send_shard
from elastic_ring.train import passes
from elastic_ring.train.vote import Outcome
from tests.unit.groups.processes import Membership, membership
from tests.unit.train.tiny_task import (
    abort_at_a_break,
    begin,
    make_task,
    plan_break,
    rebuild,
    run_steps,
    weights_sha256,
)

SQUARE = Mesh(2, 2)
BROKEN_STEP, NUM_STEPS = 1, 4


@pytest.fixture(scope="module")
def four() -> Iterator[Membership]:
    with membership(4) as made:
        yield made


# ------------------------------------------------------------ the bugs, each in the process that calls `plant`


def change_share(me: Any, change: Any) -> AbstractContextManager[Any]:
    """On the first step after a break each ring has another share."""
    share, changed = passes.share, []

    def planted(*args: Any) -> Any:
        mine = share(*args)
        if me.membership_id == (1, 1) and not changed:
            changed.append(True)
            return change(mine)
        return mine

    return mock.patch.object(passes, "share", planted)


def dropped_batch(me: Any) -> AbstractContextManager[Any]:
    """Each ring leaves its last sequence out."""
    return change_share(me, lambda mine: mine[:-1])


def repeated_sequence(me: Any) -> AbstractContextManager[Any]:
    """Each ring takes its first sequence in place of its last: the count is right."""
    return change_share(me, lambda mine: (*mine[:-1], (mine[-1][0], mine[0][1])) if len(mine) > 1 else mine)


def wrong_count(me: Any) -> AbstractContextManager[Any]:
    """The gradient is divided by one token too many."""
    return mock.patch.object(Outcome, "scale", lambda self, clip: 1.0 / (self.num_tokens + 1))


def right_count(me: Any) -> AbstractContextManager[Any]:
    """The same without the bug. Neither clips: a gradient that is clipped has the same norm whatever divided it."""
    return mock.patch.object(Outcome, "scale", lambda self, clip: 1.0 / self.num_tokens)


def mean_over_rings(me: Any) -> AbstractContextManager[Any]:
    """The gradient is divided by the number of rings once more, as a mean over replicas would."""
    return mock.patch.object(Outcome, "scale", lambda self, clip: 1.0 / self.num_tokens / SQUARE.dp)


def stale_optimizer(me: Any) -> AbstractContextManager[Any]:
    """The donor packs its newest parameters with the optimizer's state of a step before, digest and all."""
    pack = Shard.pack

    def planted(self: Shard) -> Any:
        with mock.patch.object(self, "tensors", return_value={**self.tensors(), **me.stale}):
            return pack(self)

    return mock.patch.object(Shard, "pack", planted)


def nothing(me: Any) -> AbstractContextManager[Any]:
    return nullcontext()


def plant(me: Any, bug: Any) -> None:
    remove(me)
    me.planted = bug(me)
    me.planted.__enter__()


def remove(me: Any) -> None:
    if getattr(me, "planted", None) is not None:
        me.planted.__exit__(None, None, None)
    me.planted = None


# ------------------------------------------------------------ the ways they go


def remember_optimizer(me: Any) -> None:
    tensors = me.state.shard.tensors()
    me.stale = {name: tensor.clone() for name, tensor in tensors.items() if name.startswith("optimizer/")}


def give(me: Any, workers: list[int]) -> int:
    return send_shard(me.state.shard, me.connector.link("heal", [str(w) for w in workers], str(me.rank)))


def take(me: Any, workers: list[int]) -> int:
    with me.state.filling():
        return receive_shard(me.state.shard, me.connector.link("heal", [str(w) for w in workers], str(me.rank)))


def after_a_break(four: Membership, bug: Any, folder: Path) -> tuple[list[str], str]:
    """(samples of each committed step, weights) of a run in which one step breaks off in backward and runs again."""
    four.all(begin, four.meeting(), SQUARE, make_task())
    four.all(plant, bug)
    steps = four.all(run_steps, BROKEN_STEP)[0]
    four.call(3, plan_break, "backward", BROKEN_STEP)
    abort_at_a_break(four, SQUARE, 3)
    four.all(rebuild, four.meeting(), SQUARE)
    steps += four.all(run_steps, NUM_STEPS - BROKEN_STEP)[0]
    four.all(remove)
    return [samples_text(samples) for _, samples in steps], final(four, folder)


def after_a_heal(four: Membership, bug: Any, newcomer: int, folder: Path) -> str:
    """The weights of a run in which one rank loses everything and is healed from its twin in the other ring."""
    donor = (newcomer + SQUARE.cp) % SQUARE.size
    four.all(begin, four.meeting(), SQUARE, make_task())
    four.all(run_steps, 1)
    four.call(donor, remember_optimizer)
    four.all(run_steps, 1)
    where = four.meeting()
    for rank in range(4):
        four.start(rank, lose_or_keep, where, rank == newcomer)
    for rank in range(4):
        four.result(rank)
    four.call(donor, plant, bug)
    four.start(donor, give, [donor, newcomer])
    four.start(newcomer, take, [donor, newcomer])
    assert four.result(donor) == four.result(newcomer)
    four.call(donor, remove)
    four.all(run_steps, NUM_STEPS - 2)
    return final(four, folder)


def lose_or_keep(me: Any, where: Any, lose: bool) -> None:
    if lose:
        me.state.drop()
    rebuild(me, where, SQUARE, keep=not lose)


def final(four: Membership, folder: Path) -> str:
    digests = four.all(weights_sha256, str(folder))
    assert digests[1:] == [None] * 3
    return digests[0]


@pytest.fixture(scope="module")
def clean(four: Membership, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    """(samples, weights) of the undisturbed run."""
    four.all(begin, four.meeting(), SQUARE, make_task())
    steps = four.all(run_steps, NUM_STEPS)[0]
    return [samples_text(samples) for _, samples in steps], final(four, tmp_path_factory.mktemp("clean"))


# ------------------------------------------------------------ samples


@pytest.mark.slow
@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("bug", [dropped_batch, repeated_sequence])
def test_a_sequence_that_a_re_run_drops_or_repeats_shows_in_the_samples(
    four: Membership, clean: tuple[list[str], str], tmp_path: Path, bug: Any
) -> None:
    assert after_a_break(four, nothing, tmp_path) == clean
    samples, weights = after_a_break(four, bug, tmp_path)
    assert [got == want for got, want in zip(samples, clean[0], strict=True)] == [
        step != BROKEN_STEP for step in range(NUM_STEPS)
    ]
    assert weights != clean[1]


# ------------------------------------------------------------ bits


@pytest.mark.slow
@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("bug", [wrong_count, mean_over_rings])
def test_a_gradient_divided_by_the_wrong_count_shows_in_the_weights(four: Membership, tmp_path: Path, bug: Any) -> None:
    samples, weights = after_a_break(four, right_count, tmp_path)
    wrong_samples, wrong_weights = after_a_break(four, bug, tmp_path)
    assert wrong_samples == samples
    assert wrong_weights != weights


@pytest.mark.slow
@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("newcomer", [0, 3])
def test_a_stale_optimizer_state_that_is_healed_shows_in_the_weights(
    four: Membership, clean: tuple[list[str], str], tmp_path: Path, newcomer: int
) -> None:
    """Its digest verifies, for the donor took it over what it sent: only the bits of later steps tell."""
    assert after_a_heal(four, nothing, newcomer, tmp_path) == clean[1]
    assert after_a_heal(four, stale_optimizer, newcomer, tmp_path) != clean[1]
