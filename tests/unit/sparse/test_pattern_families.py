"""Rules keep what their papers say, at every block size, causally; their lists, densities and pictures agree."""

from __future__ import annotations

import inspect
import itertools
import json
import pickle
import subprocess
import sys
import textwrap
import tracemalloc

import numpy as np
import pytest

from elastic_ring.attention.patterns import families, rules
from elastic_ring.attention.patterns.blocks import any_partly, block_kinds, kept_by_any, row_pairs, row_strips, visible
from elastic_ring.attention.patterns.families import BigBird, Dilated, Hierarchical, Profile
from elastic_ring.attention.patterns.rules import FULL, NONE, PART, Dense, Rule, Sinks, Strided, Union, Window
from elastic_ring.attention.patterns.sparse import SparsePattern
from experiments.block_function import BlockFunction
from experiments.head_rules import load_profile, longnet, mixed
from tests.unit.sparse.pattern_cases import AHEAD, RULES, sees_of

LENGTH = 67


@pytest.fixture(params=RULES)
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


def whole_mask(name: str) -> np.ndarray:
    sees = sees_of(name, LENGTH)
    return np.array([[k <= q and bool(sees(q, k)) for k in range(LENGTH)] for q in range(LENGTH)])


def test_a_rule_sees_what_its_definition_says_pair_by_pair(name):
    at = np.arange(LENGTH)
    assert np.array_equal(visible(RULES[name][0], at, at), whole_mask(name))


def check_kinds(rule: Rule, mask: np.ndarray, block: int, *, causal: bool) -> None:
    kinds = block_kinds(rule, LENGTH, block, causal)
    assert not causal or not np.triu(kinds, 1).any()
    for i, j in np.ndindex(kinds.shape):
        part = mask[i * block : (i + 1) * block, j * block : (j + 1) * block]
        assert not part.any() or kinds[i, j] != NONE
        whole = np.tril(np.ones_like(part)) if causal and i == j else np.ones_like(part)
        assert np.array_equal(part, whole) or kinds[i, j] != FULL
    assert any_partly(rule, LENGTH, block, causal) == bool((kinds == PART).any())
    assert np.array_equal(row_pairs(rule, LENGTH, block, causal), mask.sum(1))


@pytest.mark.parametrize("block", [1, 3, 4, 8, 16, 128])
def test_blocks_are_full_part_or_none_of_what_is_seen(name, block):
    check_kinds(RULES[name][0], whole_mask(name), block, causal=True)


@pytest.mark.parametrize("block", [1, 3, 4, 8, 128])
@pytest.mark.parametrize("ahead", AHEAD)
def test_blocks_that_look_ahead_are_full_part_or_none_of_what_is_seen(ahead, block):
    rule, sees = AHEAD[ahead]
    mask = np.array([[bool(sees(q, k)) for k in range(LENGTH)] for q in range(LENGTH)])
    at = np.arange(LENGTH)
    assert np.array_equal(visible(rule, at, at, causal=False), mask)
    check_kinds(rule, mask, block, causal=False)
    assert SparsePattern((rule,), block, causal=False).density(LENGTH) == pytest.approx(mask.mean())


def test_long_sequences_are_planned_without_all_pairs_of_blocks():
    """10 M tokens are 78,125 blocks, of which all pairs take 6 GB."""
    length, rows = 10_000_000, np.arange(40_000, 50_000)
    for rule, num_kept in ((Window(512), 10_004), (Sinks(64) | Window(512), 10_005), (Hierarchical(4), None)):
        tracemalloc.start()
        full, kept = kept_by_any(rule, length, 128, rows)
        assert num_kept is None or (full | kept).sum() == num_kept
        assert any_partly(rule, length, 128) == (num_kept is not None)
        assert tracemalloc.get_traced_memory()[1] < 1 << 28
        tracemalloc.stop()


def test_density_is_the_kept_share_of_the_causal_triangle(name):
    mask = whole_mask(name)
    pattern = SparsePattern((RULES[name][0],), 4)
    assert pattern.density(LENGTH) == pytest.approx(mask.sum() / (LENGTH * (LENGTH + 1) / 2))
    assert SparsePattern((Dense(),)).density(LENGTH) == 1.0
    packed = SparsePattern((RULES[name][0],), 4, (0, 20))
    assert packed.row_pairs(LENGTH)[20:].sum() == pattern.row_pairs(LENGTH - 20).sum()


def test_rules_are_hashable_printable_and_survive_a_pickle(name):
    rule = RULES[name][0]
    assert str(rule) in str(SparsePattern((rule,)))
    assert hash(SparsePattern((rule,))) == hash(SparsePattern((rule,)))
    if name != "own function":
        assert pickle.loads(pickle.dumps(rule)) == rule


def drawn_in_docstrings() -> list[tuple[Rule, int]]:
    """The rules of the docstrings' pictures, in single-token blocks."""
    return [
        (Dense(), 4),
        (Window(2), 4),
        (Sinks(1), 4),
        (Strided(3, 2, 1), 5),
        (Dilated((4, 8, 16), (1, 2, 4)), 9),
        (BigBird(2, 1, 1, 0, 1), 6),
        (Hierarchical(2, 1), 8),
    ]


@pytest.mark.parametrize(("rule", "length"), drawn_in_docstrings(), ids=str)
def test_the_picture_in_a_docstring_is_what_the_rule_draws(rule, length):
    kinds = block_kinds(rule, length, 1)
    picture = ["".join(".+#"[kind] for kind in row[: i + 1]) for i, row in enumerate(kinds)]
    text = inspect.getdoc(type(rule))
    assert text is not None
    shown = textwrap.dedent(text.split("::\n\n")[1])
    assert [line.split()[0] for line in shown.splitlines() if line.strip()] == picture


def test_every_family_with_a_picture_is_drawn():
    kinds = {
        kind
        for module in (rules, families)
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, Rule) and "::" in (kind.__doc__ or "")
    }
    assert kinds == {type(rule) for rule, _ in drawn_in_docstrings()}


def test_bigbird_draws_from_its_seed_the_same_at_every_length_and_in_every_process():
    rule = BigBird(2, 1, 3, seed=7)
    short, long = block_kinds(rule, 128 * 20, 128), block_kinds(rule, 128 * 100, 128)
    assert np.array_equal(short, long[:20, :20])
    assert ((long[50:] == FULL).sum(1) == 2 + 1 + 3).all()
    assert not np.array_equal(long, block_kinds(BigBird(2, 1, 3, seed=8), 128 * 100, 128))
    code = (
        "import zlib; from elastic_ring.attention.patterns.blocks import block_kinds;"
        "from elastic_ring.attention.patterns.families import BigBird;"
        "print(zlib.crc32(block_kinds(BigBird(2, 1, 3, seed=7), 128 * 100, 128).tobytes()))"
    )
    import zlib

    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(printed) == zlib.crc32(long.tobytes())


def test_longnet_shifts_its_heads_and_grouped_heads_share_a_shift():
    assert [rule.offset for rule in longnet(6, (8, 32), (1, 4))] == [0, 1, 2, 3, 0, 1]
    assert [rule.offset for rule in longnet(6, (8, 32), (1, 4), heads_per_offset=3)] == [0, 0, 0, 1, 1, 1]
    union = sum(visible(rule, np.arange(32), np.arange(32)).astype(int) for rule in longnet(4, (32,), (4,)))
    assert union.max() == 1
    assert np.array_equal(union.sum(1), np.arange(32) // 4 + 1)


def test_the_hierarchy_grows_with_the_logarithm_of_the_length():
    rows = [(block_kinds(Hierarchical(4), 128 * n, 128)[-1] != NONE).sum() for n in (64, 128, 256, 512)]
    assert all(after - before <= 3 for before, after in itertools.pairwise(rows))


def test_a_learned_profile_keeps_the_share_that_is_asked_for(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"unit_tokens": 64, "counts": [[5, 3, 0, 9, 3], [1, 0, 0, 0, 0]]}))
    assert load_profile(path, keep=0.7) == (Profile((0, 3), 64), Profile((0,), 64))
    assert load_profile(path, keep=0.8) == (Profile((0, 1, 3), 64), Profile((0,), 64))
    assert load_profile(path, keep=1.0)[0] == Profile((0, 1, 3, 4), 64)
    for text in ("[]", "{}", '{"unit_tokens": 64, "counts": [[]]}', '{"unit_tokens": 64, "counts": [[-1]]}', "x"):
        path.write_text(text)
        with pytest.raises(ValueError, match="profile"):
            load_profile(path, keep=0.5)
    with pytest.raises(ValueError, match="keep=0"):
        load_profile(path, keep=0)


def test_a_users_function_that_looks_ahead_or_is_not_elementwise_is_refused_by_name():
    def looks_ahead(i: np.ndarray, j: np.ndarray) -> np.ndarray:
        return (i == j) | ((i == 3) & (j == 5))

    def branches(i: np.ndarray, j: np.ndarray) -> bool:
        return True if i > j else False  # noqa: SIM210

    with pytest.raises(ValueError, match="looks_ahead: lets query unit 3 see unit 5 of the future"):
        SparsePattern((BlockFunction(looks_ahead),)).density(128 * 8)
    with pytest.raises(ValueError, match="branches: must take integer arrays"):
        SparsePattern((BlockFunction(branches) | Window(4),)).density(128 * 8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Window(0), "tokens=0"),
        (lambda: Sinks(0), "leave Sinks out"),
        (lambda: Strided(0), "every=0"),
        (lambda: Dilated((8, 16), (1,)), "one rate for each"),
        (lambda: Dilated((6,), (1,), 0, 4), "multiple of unit_tokens=4"),
        (lambda: Dilated((8,), (0,)), "rates=0"),
        (lambda: BigBird(0), "window=0"),
        (lambda: Hierarchical(0), "base=0"),
        (lambda: Profile((1, 2)), "beginning with 0"),
        (lambda: Union(()), "at least one"),
        (lambda: SparsePattern(()), "one rule for all heads"),
        (lambda: Window(4, -1), "ahead=-1"),
        (
            lambda: SparsePattern((Dense(), Strided(4)), causal=False),
            "causal=False, but strided:4 does not say which later",
        ),
        (lambda: SparsePattern((Sinks(4) | Window(8),), causal=False), "sinks:4.window:8 does not say"),
        (lambda: SparsePattern((Dense(),), 0), "block=0"),
        (lambda: SparsePattern((Dense(),), 4, (3,)), "position 0"),
        (lambda: mixed(), "at least one head"),
    ],
)
def test_wrong_settings_are_refused_with_a_way_out(make, message):
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_planning_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from elastic_ring.attention.autolayout import Sizes\n"
        "from elastic_ring.attention.patterns.sparse import SparsePattern\n"
        "from elastic_ring.attention.plan.sparse_tiles import tiles\n"
        "from experiments.head_rules import longnet\n"
        "from experiments.pattern_choice import choose\n"
        "chosen = choose(SparsePattern(longnet(2, (64, 256), (1, 4)), 16), 512, 4, Sizes(2, 1))\n"
        "print(len(tiles(chosen.schedule, 3)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["4"]


def by_definition(seed: int, row: int, window: int, first: int, randoms: int) -> list[int]:
    """SplitMix64 over (seed, row, attempt), one attempt after the other, in plain integers."""
    mask, found, attempt = (1 << 64) - 1, [], 0
    num_open = row - window + 1 - first
    while len(found) < min(randoms, num_open):
        state = 0
        for word in (seed, row, attempt):
            state = (state + word + 0x9E3779B97F4A7C15) & mask
            state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
            state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
            state ^= state >> 31
        attempt += 1
        if first + state % num_open not in found:
            found.append(first + state % num_open)
    return found


@pytest.mark.parametrize("rule", [BigBird(2, 1, 5, seed=3), BigBird(1, 0, 40, seed=0), BigBird(3, 2, 0)])
def test_what_bigbird_draws_is_the_same_on_every_machine(rule):
    kinds = rule.kinds(300, 128)
    for row in range(0, 300, 7):
        near = set(range(max(0, row - rule.window + 1), row + 1)) | set(range(min(rule.globals, row + 1)))
        drawn = by_definition(rule.seed, row, rule.window, rule.globals, rule.randoms)
        assert set(np.flatnonzero(kinds[row, : row + 1])) == near | set(drawn)


@pytest.mark.parametrize(
    "rule",
    [
        BigBird(2, 1, 5, seed=3),
        Dilated((512, 2048, 4096), (1, 3, 8), 5, 128),
        BigBird(1, 0, 3),
        Hierarchical(3),
        Strided(5, 2),
        Profile((0, 2, 9)),
    ],
    ids=str,
)
@pytest.mark.parametrize("block", [32, 128])
def test_kinds_of_whole_blocks_are_what_the_rule_says_of_every_pair(rule, block):
    for num_blocks in (1, 7, 64, 65):
        every = np.arange(num_blocks)
        q, k = (every * block)[:, None], (every * block)[None, :]
        wanted = FULL * (rule.sees(q, k) & (k <= q))
        assert np.array_equal(rule.kinds(num_blocks, block), wanted)
        some, other = every[::3], np.array([0, 0, num_blocks // 2, num_blocks - 1])
        found = [kinds for _, kinds in row_strips(rule, num_blocks * block, block, some, other[::-1])]
        assert np.array_equal(np.concatenate(found), wanted[some][:, other[::-1]])
        full, kept = kept_by_any(rule, num_blocks * block, block, some)
        off_diagonal = wanted[some].copy()
        off_diagonal[np.arange(len(some)), some] = NONE
        assert np.array_equal(full, off_diagonal.any(0))
        assert np.array_equal(kept | full, wanted[some].any(0))
