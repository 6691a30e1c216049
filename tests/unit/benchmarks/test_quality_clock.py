"""Training for a time: the paths that skip mean what masks mean, the time is kept, and a file is gone on with."""

from __future__ import annotations

import json
import math
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.quality import clock as clock_module
from benchmarks.quality import quality_clock
from benchmarks.quality.clock import (
    LOOK_STEPS,
    REST_LOOKS,
    WARM_STEPS,
    Attentions,
    ClockSettings,
    compiled_pieces,
    expected_share,
    learning_rate,
    median_ms,
    train_for,
)
from benchmarks.quality.content import ContentFamily
from benchmarks.quality.families import MOST_KEPT, block_families, families
from benchmarks.quality.long_range import long_range_bits
from benchmarks.quality.quality_clock import check_settings, main, table
from benchmarks.quality.records import append, finished
from benchmarks.quality.small.families import Family
from benchmarks.quality.small.model import Masks, SmallConfig, SmallModel, attend
from benchmarks.quality.small.text import Corpus, batch, corpus
from benchmarks.quality.small.train import Settings
from benchmarks.quality.tasks import (
    ASSIGN,
    COPY,
    FIRST_SYMBOL,
    FIRST_VALUE,
    IGNORED,
    TASKS,
    VOCAB_SIZE,
    Example,
    example,
    train_tasks,
)
from elastic_ring.attention import layers
from elastic_ring.data.source import TextFiles
from tests.unit.attention.attention_rings import one_thread

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
SMALL = ClockSettings(seconds=1.0, seq_len=128, block=8, batch=2, width=32, num_layers=2, num_heads=2)
NAMES = tuple(block_families(128, 8, 2))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "long.txt"
    words = [f"name_{number * 7919 % 101} = {number * 31 % 17}\n" for number in range(4000)]
    path.write_text("".join(words), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def texts(text: Path) -> Corpus:
    return corpus(SMALL.seq_len, 4, source=TextFiles(SMALL.seq_len, (str(text),)), limit=64)


def masks_of(family: Family, settings: ClockSettings) -> Masks:
    """By the definition; `families` has content apart from the texts."""
    num_chosen = int(family.text.split(":")[1].split(",")[0]) if family.text.startswith("topk") else 0
    if num_chosen:
        family = ContentFamily(family.name, "", settings.block, num_chosen, first_query=True)
    return family.masks(settings.seq_len, settings.num_heads)


def loss_and_gradients(model: SmallModel, rows: torch.Tensor, seen: Any) -> list[torch.Tensor]:
    loss = F.cross_entropy(model(rows[:, :-1], seen).flatten(0, 1), rows[:, 1:].flatten())
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("name", NAMES)
def test_what_skips_gives_the_loss_and_gradients_of_the_masks(name, texts):
    family = block_families(SMALL.seq_len, SMALL.block, SMALL.num_layers)[name]
    model = SmallModel(SmallConfig(texts.vocab_size, SMALL.width, num_heads=SMALL.num_heads), 0)
    rows = torch.from_numpy(texts.training[:3])
    found = loss_and_gradients(model, rows, Attentions(family, SMALL, CPU).of_step())
    wanted = loss_and_gradients(model, rows, masks_of(family, SMALL))
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    if name != "dense":
        dense = loss_and_gradients(model, rows, masks_of(Family("dense", "dense", SMALL.block), SMALL))
        assert not torch.allclose(found[0], dense[0], atol=1e-6), "a pattern that hides nothing shows nothing"


@pytest.mark.parametrize(("seq_len", "block"), [(16384, 128), (4096, 128), (1024, 32), (512, 16)])
def test_families_of_blocks_keep_a_quarter_at_most_and_nearly_so(seq_len, block):
    for family in block_families(seq_len, block, 8).values():
        if family.name != "dense":
            assert 0.6 * MOST_KEPT < family.density(seq_len, 8, 4) <= MOST_KEPT, family
    with pytest.raises(ValueError, match="at least 16 whole blocks"):
        block_families(seq_len + 1, block)


class Ticks:
    """A clock that every step of an optimizer takes `step_s` further, or what that says for its number."""

    def __init__(self, step_s: float | Callable[[int], float]) -> None:
        self._step_s, self._now, self.num_steps = step_s, 100.0, 0
        self.looks: list[int] = []

    def __call__(self) -> float:
        self.looks.append(self.num_steps)
        return self._now

    @contextmanager
    def running(self) -> Iterator[Ticks]:
        def stepped(*arguments: Any) -> None:
            self._now += self._step_s(self.num_steps) if callable(self._step_s) else self._step_s
            self.num_steps += 1

        handle = register_optimizer_step_post_hook(stepped)
        try:
            yield self
        finally:
            handle.remove()


def train_ticking(step_s: float) -> Any:
    """`train_for` in this process by such a clock."""

    def train(*arguments: Any, **options: Any) -> Any:
        with Ticks(step_s).running() as ticks:
            return train_for(*arguments, **options, clock=ticks)

    return train


DENSE = block_families(128, 8, 2)["dense"]


@pytest.mark.slow
@pytest.mark.thinned(num=2)
@pytest.mark.parametrize(("step_s", "steps"), [(0.25, 4), (0.3, 4), (0.34, 3), (2.0, 1), (0.03, 34), (0.0399, 26)])
def test_no_step_begins_when_the_time_is_over(step_s, steps, texts):
    found = train_ticking(step_s)(DENSE, 0, SMALL, texts, CPU)
    assert found["steps"] == steps == math.ceil(SMALL.seconds / step_s)
    assert found["seconds"] == pytest.approx(steps * step_s)
    assert found["ms_per_step"] == found["median_ms"] == found["rest_ms"] == pytest.approx(1000 * step_s)
    assert found["tokens"] == steps * SMALL.batch * SMALL.seq_len
    assert math.isfinite(found["tail_loss"])


def test_the_clock_is_looked_at_every_few_steps_alike_in_training_and_in_what_is_not_attention(texts):
    """Each look has the host wait for the GPU."""
    with Ticks(0.035).running() as ticks:
        found = train_for(DENSE, 0, SMALL, texts, CPU, clock=ticks)
    assert found["steps"] == 29
    done = [0, *range(1, LOOK_STEPS), 8, 16, 24, 29]
    rest = 29 + LOOK_STEPS
    wanted = [*done, *range(rest, rest + LOOK_STEPS * REST_LOOKS + 1, LOOK_STEPS)]
    assert [steps - WARM_STEPS for steps in ticks.looks] == wanted


def test_one_long_step_moves_the_mean_and_not_the_median(texts):
    with Ticks(lambda number: 0.4 if number == WARM_STEPS + 12 else 0.02).running() as ticks:
        found = train_for(DENSE, 0, SMALL, texts, CPU, clock=ticks)
    assert found["median_ms"] == pytest.approx(20)
    assert found["ms_per_step"] > 30
    assert found["seconds"] < 1 + 0.4, "the time is up at a look"


def test_between_looks_the_share_of_the_time_goes_on_at_the_pace_so_far():
    looks = [(0, 50.0), (1, 51.0), (8, 54.0)]
    assert expected_share(looks[:1], 1, 10.0) == 0
    assert expected_share(looks, 8, 10.0) == pytest.approx(0.4)
    assert expected_share(looks, 12, 10.0) == pytest.approx(0.6)
    assert median_ms(looks) == pytest.approx(1000 * (1 + 3 / 7) / 2)


def test_dense_runs_its_own_kernel_by_the_same_objects_as_all(texts, monkeypatch):
    made = []

    def spied(kind: Any) -> Any:
        def make(*arguments: Any, **options: Any) -> Any:
            made.append(kind.__name__)
            return kind(*arguments, **options)

        return make

    for kind in (layers.RingAttention, layers.RingAttention):
        monkeypatch.setattr(layers, kind.__name__, spied(kind))
    q, k, v = torch.randn(3, 2, 128, 2, 16)
    for name, wanted in (("dense", ["RingAttention"] * 2), ("random", ["RingAttention"] * 2)):
        made.clear()
        attentions = Attentions(block_families(128, 8, 2)[name], SMALL, CPU)
        for attention in (*attentions.of_step(), *attentions.of_step()):
            assert attention(q, k, v).shape == q.shape
        assert made == wanted, "one object a step, which its layers share"


# ------------------------------------------------------------ compiled
TORCHS_OWN = [
    # torch looks at it, and hides its own warning in a way that comes after a filter which makes errors of warnings.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Dynamo and AOTAutograd as ever, their graphs run as they are."""
    pieces = compiled_pieces("aot_eager")
    monkeypatch.setattr(clock_module, "compiled_pieces", lambda: pieces)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_the_learning_rate_ends_when_the_time_does():
    assert learning_rate(0.05, 1.0) == pytest.approx(1.0)
    assert learning_rate(1.0, 1.0) == pytest.approx(0.05)
    rates = [learning_rate(share / 100, 1.0) for share in range(101)]
    assert rates[:6] == sorted(rates[:6])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert min(rates) > 0


def arguments(out: Path, text: Path, *more: str) -> list[str]:
    sizes = "--seq-len 128 --block 8 --batch 1 --width 32 --heads 2 --layers 1 --seconds 2 --seeds 0,1"
    return ["--out", str(out), "--text", str(text), *sizes.split(), "--families", "dense,random", *more]


@pytest.mark.soak
def test_a_file_is_gone_on_with_and_nothing_is_run_twice(tmp_path, text, capsys):
    out = tmp_path / "deep" / "clock.jsonl"
    trained = []

    def counted(step_s: float) -> Any:
        def train(family: Family, seed: int, *rest: Any, **options: Any) -> Any:
            trained.append((family.name, seed, options["steps"]))
            return train_ticking(step_s)(family, seed, *rest, **options)

        return train

    assert main(arguments(out, text, "--seeds", "0"), counted(1.0)) == 0
    lines = out.read_text(encoding="utf-8").splitlines()
    assert main(arguments(out, text, "--parts", "clock,tokens"), counted(0.5)) == 0
    assert trained == [
        ("dense", 0, None),
        ("random", 0, None),
        ("random", 0, 2),
        ("dense", 1, None),
        ("random", 1, None),
        ("random", 1, 4),
    ]
    assert out.read_text(encoding="utf-8").splitlines()[: len(lines)] == lines
    signal = finished(out)["signal", "", 0]
    assert signal["held"] == quality_clock.NUM_HELD
    printed = capsys.readouterr().out
    assert "seed 0    seed 1" in printed
    assert main(arguments(out, text, "--stop-after", "-1", "--seeds", "5"), counted(1.0)) == 0
    assert len(trained) == 6


@pytest.mark.slow
def test_other_settings_another_text_and_unknown_names_are_refused_by_name(tmp_path, text, capsys):
    out, changed = tmp_path / "clock.jsonl", tmp_path / "changed.txt"
    assert main(arguments(out, text, "--seeds", "0", "--families", "random"), train_ticking(1.0)) == 0
    changed.write_text(text.read_text(encoding="utf-8").replace("name", "mane"), encoding="utf-8")
    for more, message in (
        (["--seconds", "3"], "seconds 2.0 (now 3.0)"),
        (["--text", str(changed)], "text_digest"),
        (["--families", "fast"], "--families: 'fast' is none of dense, "),
        (["--parts", "bytes"], "--parts: 'bytes' is none of clock, tokens"),
        (["--block", "9"], "at least 16 whole blocks"),
        (["--device", "gpu"], "--device gpu: give cpu"),
        (["--device", "cuda"], "heads of 64 or 128"),
        (["--device", "cuda:99", "--width", "128", "--seq-len", "2048", "--block", "128"], "name one, or cpu"),
        (["--parts", "tokens", "--families", "random"], "seed 0 has no dense run by the clock"),
    ):
        assert main(arguments(out, text, *more), train_ticking(1.0)) == 2
        assert message in capsys.readouterr().err


def test_patterns_that_gpus_cannot_run_are_refused_before_anything_is_trained():
    with pytest.raises(ValueError, match="128"):
        Attentions(block_families(1024, 32, 2)["random"], replace(SMALL, seq_len=1024, block=32), torch.device("cuda"))


# ------------------------------------------------------------ each run in a process of its own


@pytest.mark.slow
def test_the_script_runs_from_a_checkout(tmp_path, text):
    """As the docstring has it, in processes that import the script again."""
    out = tmp_path / "clock.jsonl"
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "quality" / "quality_clock.py"),
        *arguments(out, text, "--seeds", "0"),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*command, "--seconds", "0.2"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    values = [finished(out)["clock", name, 0]["value"] for name in ("dense", "random")]
    assert all(0.2 <= value["seconds"] < 2 and value["steps"] >= 1 for value in values)
    assert done.stdout.count("! steps without") <= 1
    assert "random " in done.stdout


# ------------------------------------------------------------ the table


@pytest.mark.parametrize("name", ["quality-clock-16K-2026-11-22.jsonl", "quality-clock-32K-2026-11-22.jsonl"])
def test_files_of_before_medians_are_still_printed(name, capsys):
    assert main(["--out", str(ROOT / "benchmarks" / "results" / "quality" / name), "--table"]) == 0
    printed = capsys.readouterr().out
    row = next(line.split() for line in printed.splitlines() if line.startswith("dense"))
    assert row[3] == "-"
    assert "steps without attention took over 15%" in printed, "in these they did"


def test_the_table_prints_gaps_to_dense_of_the_same_seed():
    def line(part: str, name: str, seed: int, tail: float, steps: int) -> dict[str, Any]:
        value = {
            "tail_loss": tail,
            "loss": tail,
            "train_loss": 0.5,
            "steps": steps,
            "tokens": 1,
            "epochs": 2.0,
            "seconds": 60.0,
            "ms_per_step": 60e3 / steps,
            "median_ms": 19.0,
            "density": 0.25,
            "rest_ms": 8.1 if (name, seed) == ("random", 1) else 7.0,
        }
        return {"part": part, "family": name, "seed": seed, "value": value}

    records = [
        line("clock", "dense", 0, 0.7, 1000),
        line("clock", "dense", 1, 0.8, 1000),
        line("clock", "random", 0, 0.65, 3000),
        line("clock", "random", 1, 0.85, 3000),
        line("clock", "random", 2, 0.9, 3000),
        line("tokens", "random", 0, 0.9, 1000),
    ]
    found = table({(r["part"], r["family"], r["seed"]): json.loads(json.dumps(r)) for r in records})
    rows = [row.split() for row in found if row.startswith("random")]
    assert rows[0][1:6] == ["0.250", "20.00", "19.00", "7.37", "3000"]
    assert rows[0][-4:] == ["-0.0500", "+0.0500!", "-", "+0.0000"]
    assert sum("over 15% more or less" in row for row in found) == 1
    assert rows[1][-2:] == ["+0.2000", "+0.2000"]


def begin(path: Path, number: int, start: Any, answers: Any) -> None:
    start.wait()
    try:
        check_settings(path, {"number": number})
        answers.put("begun")
    except ValueError as error:
        answers.put("named" if "number" in str(error) else str(error))


def test_of_processes_that_begin_a_file_together_one_does_and_the_others_hear_of_it(tmp_path):
    """Threads, which have a lock of their own each as processes have."""
    for round_ in range(20):
        start, answers = threading.Barrier(4), queue.Queue[str]()
        threads = [
            threading.Thread(target=begin, args=(tmp_path / f"{round_}.jsonl", number, start, answers))
            for number in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(answers.get() for _ in threads) == ["begun", "named", "named", "named"]
        assert len((tmp_path / f"{round_}.jsonl").read_bytes().splitlines()) == 1


def test_a_line_that_was_cut_off_is_none_and_the_next_takes_its_place(tmp_path):
    out = tmp_path / "clock.jsonl"
    one, two = ({"part": "clock", "family": name, "seed": 0, "value": {}} for name in ("dense", "random"))
    append(out, one)
    whole = out.read_bytes()
    for cut in (b"{", b'{"part": "clo', json.dumps(two).encode()):
        out.write_bytes(whole + cut)
        assert list(finished(out)) == [("clock", "dense", 0)]
        append(out, two)
        assert out.read_bytes() == whole + json.dumps(two).encode() + b"\n"
    for other in (b"a letter", whole + b"a letter", b"a letter\n"):
        out.write_bytes(other)
        with pytest.raises(ValueError, match="not a file of this job"):
            finished(out)
    out.write_bytes(b"a letter")
    with pytest.raises(ValueError, match="not a file of this job"):
        append(out, two)
    assert out.read_bytes() == b"a letter"


# ------------------------------------------------------------------------------- the tasks that quality is measured on


LENGTH, BLOCK = 128, 8


def examples(name: str, num: int = 50) -> list[Example]:
    return [example(name, LENGTH, BLOCK, 0, number) for number in range(num)]


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_a_function_of_its_seed_and_number(name):
    first, again, other = example(name, LENGTH, BLOCK, 0, 3), example(name, LENGTH, BLOCK, 0, 3), examples(name)[4]
    assert np.array_equal(first.tokens, again.tokens)
    assert np.array_equal(first.targets, again.targets)
    assert not np.array_equal(first.tokens, other.tokens)
    assert not np.array_equal(first.tokens, example(name, LENGTH, BLOCK, 1, 3).tokens)


@pytest.mark.parametrize("name", TASKS)
def test_every_answer_stands_where_its_distance_says(name):
    for one in examples(name):
        asked = np.flatnonzero(one.targets != IGNORED)
        assert asked.size
        assert one.tokens.min() > 0
        assert one.tokens.max() < VOCAB_SIZE
        for at in asked:
            source = at - one.distance[at]
            assert 0 < source <= at
            assert one.tokens[source] == one.targets[at]
            assert one.phase[at] == source % BLOCK
        assert (one.distance[one.targets == IGNORED] == -1).all()


def solve(name: str, tokens: np.ndarray, at: int) -> int:
    """What a reader of the whole sequence says, told only the rules of the task."""
    seen = tokens[: at + 1]
    if name == "selective copy":
        content = [t for t in seen[1 : list(seen).index(COPY)] if FIRST_SYMBOL <= t < FIRST_VALUE]
        return int(content[at - list(seen).index(COPY)])
    if name == "variables":
        at_ = next(i for i in range(1, at) if seen[i] == tokens[at] and seen[i + 1] == ASSIGN)
        named = seen[at_ + 2]
        root = next(i for i in range(1, at) if seen[i] == named and seen[i + 1] == ASSIGN)
        return int(seen[root + 2])
    before = next(i for i in range(1, at) if seen[i] == tokens[at])
    return int(seen[before + 1])


@pytest.mark.parametrize("name", TASKS)
def test_every_task_can_be_solved_from_what_is_shown(name):
    for one in examples(name):
        for at in np.flatnonzero(one.targets != IGNORED):
            assert solve(name, one.tokens, int(at)) == one.targets[at], (name, at)


def test_needles_come_from_all_distances_and_copies_from_all_phases():
    distances = [int(one.distance.max()) for one in examples("needle", 200)]
    assert min(distances) < LENGTH // 4
    assert max(distances) > 3 * LENGTH // 4
    phases = {int(p) for one in examples("boundary copy", 200) for p in one.phase[one.phase >= 0]}
    assert phases == set(range(BLOCK))


def test_the_model_sees_what_the_pattern_keeps_and_nothing_else():
    """An earlier token changes a later output only where the family's layers let it through."""
    with one_thread():
        for name, family in families(LENGTH, BLOCK).items():
            if isinstance(family, ContentFamily):
                continue
            config = SmallConfig(VOCAB_SIZE)
            masks = family.masks(LENGTH, config.num_heads)
            q, k, v = (torch.randn(1, LENGTH, 4, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
            mask = masks.of_layer(0, q.device)
            base = attend(q, k, v, mask)
            changed = v.clone()
            changed[:, 5] += 1
            moved = (attend(q, k, changed, mask) - base).abs().amax((0, 3)).T > 1e-6
            seen = torch.ones(4, LENGTH, dtype=torch.bool) if mask is None else mask[:, :, 5].expand(4, -1)
            seen = seen & (torch.arange(LENGTH) >= 5)
            assert torch.equal(moved, seen), name


def test_content_keeps_own_blocks_and_no_future():
    with one_thread():
        family = families(LENGTH, BLOCK)["content top-k"]
        assert isinstance(family, ContentFamily)
        masks = family.masks(LENGTH, 4)
        q, k = torch.randn(2, LENGTH, 4, 16), torch.randn(2, LENGTH, 4, 16)
        mask = masks.for_call(0, q, k)
        assert not mask.triu(1).any()
        assert mask.diagonal(dim1=2, dim2=3).all()
        per_row = mask[:, :, BLOCK - 1 :: BLOCK].sum(-1)
        assert int(per_row.max()) == family.top_k * BLOCK


def test_each_sequence_of_a_batch_chooses_as_it_does_alone():
    with one_thread():
        family = families(LENGTH, BLOCK)["content top-k"]
        masks = family.masks(LENGTH, 4)
        q, k = torch.randn(3, LENGTH, 4, 16), torch.randn(3, LENGTH, 4, 16)
        alone = [masks.for_call(0, *pair) for pair in zip(q.split(1), k.split(1), strict=True)]
        assert torch.equal(masks.for_call(0, q, k), torch.cat(alone))
        assert not torch.equal(alone[0], alone[1])


def test_the_causal_choice_does_not_change_with_later_queries_of_the_block():
    with one_thread():
        generator = torch.Generator().manual_seed(0)
        q, k, other = (torch.randn(1, LENGTH, 4, 16, generator=generator) for _ in range(3))
        first = (torch.arange(LENGTH) % BLOCK == 0)[None, :, None, None]
        moved = torch.where(first, q, other)
        for name, same in (("causal content", True), ("content top-k", False)):
            family = families(LENGTH, BLOCK)[name]
            masks = family.masks(LENGTH, 4)
            assert torch.equal(masks.for_call(0, q, k), masks.for_call(0, moved, k)) == same


def test_equal_seeds_train_to_equal_figures():
    with one_thread():
        family = families(64, 4)["sinks + window"]
        settings = Settings(steps=3, seq_len=64, block=4, per_task=1, num_evaluated=4)
        runs = [train_tasks(family, seed, settings) for seed in (0, 0, 1)]
        for run in runs:
            run.pop("train_s")
        assert runs[0] == runs[1]
        assert runs[0]["loss"] != runs[2]["loss"]
        assert SmallModel(SmallConfig(8), 0)(torch.zeros(1, 64, dtype=torch.int64), Masks(None, 64, 4)).shape == (
            1,
            64,
            8,
        )


def test_the_check_of_long_range_signal_finds_it_where_it_is_and_only_there():
    """Documents whose end repeats their beginning, beside documents of noise."""
    noise = np.random.default_rng(0).integers(97, 123, (6, 1025))
    repeating = noise.copy()
    repeating[:, -128:] = repeating[:, :128]
    bits = long_range_bits(noise, near=128, tail=128)
    assert bits["far"] == pytest.approx(bits["other"], abs=0.3)
    bits = long_range_bits(repeating, near=128, tail=128)
    assert bits["far"] < bits["other"] - 2
    assert bits["near"] == pytest.approx(bits["other"], abs=0.5)


def test_a_corpus_has_no_end_of_document_inside_a_sequence_and_keeps_held_out_ones_apart(tmp_path):
    for number in range(30):
        (tmp_path / f"{number:02}.txt").write_text(f"{number:02} " * 400)
    found = corpus(128, 4, source=TextFiles(128, (str(tmp_path),)))
    assert found.held.shape == (4, 129)
    assert (found.sequences[:, :-1] < 256).all()
    assert len(found.training) + 4 == len(found.sequences)
    epoch = batch(found, 0, 0, len(found.training))
    assert sorted(row.tobytes() for row in epoch) == sorted(row.tobytes() for row in found.training)
    assert not np.array_equal(epoch, batch(found, 1, 0, len(found.training)))
