"""Training for a time: the paths that skip mean what masks mean, the time is kept, and a file is gone on with."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from elastic_ring.attention.block_kernels import REFERENCE
from elastic_ring.data.source import TextFiles
from tests.unit.attention_rings import one_thread
from tune import quality_clock
from tune.quality.clock import WARM_STEPS, Attentions, ClockSettings, learning_rate, train_for, train_step
from tune.quality.families import MOST_KEPT, Family, block_families
from tune.quality.model import Masks, SmallConfig, SmallModel
from tune.quality.text import Corpus, corpus
from tune.quality_clock import main, table
from tune.quality_table import finished

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
    return Masks(
        None if num_chosen else family.pattern(), settings.seq_len, settings.num_heads, top_k=num_chosen,
        block=settings.block, first_query=True,
    )  # fmt: skip


def loss_and_gradients(model: SmallModel, rows: torch.Tensor, seen: Any) -> list[torch.Tensor]:
    loss = F.cross_entropy(model(rows[:, :-1], seen).flatten(0, 1), rows[:, 1:].flatten())
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("name", NAMES)
def test_what_skips_gives_the_loss_and_gradients_of_the_masks(name: str, texts: Corpus) -> None:
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


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in NAMES[1:]), ("one dense layer", "bfloat16")]
)
def test_what_gpus_run_in_blocks_of_128_trains_alike_on_a_cpu(name: str, dtype: str, text: Path) -> None:
    """The same lines, tables and types as on a GPU; only the kernel is the reference, and no device is waited for."""
    settings = replace(SMALL, seq_len=2048, block=128, width=16, dtype=dtype, sparse_kernel=REFERENCE.name)
    family = block_families(2048, 128, 2)[name]
    read = corpus(2048, 1, source=TextFiles(2048, (str(text),)), limit=8)
    model = SmallModel(SmallConfig(read.vocab_size, settings.width, num_heads=SMALL.num_heads), 0)
    rows = torch.from_numpy(read.training[:2])
    wanted = loss_and_gradients(model, rows, masks_of(family, settings))[0]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    found = train_step(model, optimizer, Attentions(family, settings, CPU), rows)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5 if dtype == "float32" else 1e-2)
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize(("seq_len", "block"), [(16384, 128), (4096, 128), (1024, 32), (512, 16)])
def test_families_of_blocks_keep_a_quarter_at_most_and_nearly_so(seq_len: int, block: int) -> None:
    for family in block_families(seq_len, block, 8).values():
        if family.name != "dense":
            assert 0.6 * MOST_KEPT < family.density(seq_len, 8, 4) <= MOST_KEPT, family
    with pytest.raises(ValueError, match="at least 16 whole blocks"):
        block_families(seq_len + 1, block)


class Ticks:
    """A clock that reads one second further each time."""

    def __init__(self, step_s: float) -> None:
        self.step_s, self.reads = step_s, 0

    def __call__(self) -> float:
        self.reads += 1
        return 100 + self.step_s * self.reads


@pytest.mark.parametrize(("step_s", "steps"), [(0.25, 4), (0.3, 4), (0.34, 3), (2.0, 1)])
def test_no_step_begins_when_the_time_is_over(step_s: float, steps: int, texts: Corpus) -> None:
    found = train_for(block_families(128, 8, 2)["dense"], 0, SMALL, texts, CPU, clock=Ticks(step_s))
    assert found["steps"] == steps == math.ceil(SMALL.seconds / step_s)
    assert found["seconds"] == pytest.approx(steps * step_s)
    assert found["ms_per_step"] == pytest.approx(1000 * step_s)
    assert found["rest_ms"] == pytest.approx(1000 * step_s / WARM_STEPS)
    assert found["tokens"] == steps * SMALL.batch * SMALL.seq_len
    assert math.isfinite(found["tail_loss"])


class CountedPairs(TorchDispatchMode):
    """Pairs of queries and keys that attention kernels of CPUs went over, in both passes, as seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "flash_attention_for_cpu" in str(func):
            q, k = args[1:3] if "backward" in str(func) else args[:2]
            self.pairs += q.shape[:3].numel() * k.size(2)
        return func(*args, **(kwargs or {}))


def test_who_goes_over_fewer_pairs_makes_more_steps_in_the_same_time(texts: Corpus) -> None:
    steps = {}
    for name in ("dense", "one dense layer", "sinks + window", "causal content"):
        with CountedPairs() as counted:
            clock = lambda counted=counted: counted.pairs / 6e5  # noqa: E731
            steps[name] = train_for(block_families(128, 8, 2)[name], 0, SMALL, texts, CPU, clock=clock)["steps"]
    assert steps["dense"] >= 2
    assert steps["one dense layer"] > steps["dense"]
    assert min(steps["sinks + window"], steps["causal content"]) >= 2 * steps["dense"]


def test_the_learning_rate_ends_when_the_time_does() -> None:
    assert learning_rate(0.05, 1.0) == pytest.approx(1.0)
    assert learning_rate(1.0, 1.0) == pytest.approx(0.05)
    rates = [learning_rate(share / 100, 1.0) for share in range(101)]
    assert rates[:6] == sorted(rates[:6])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert min(rates) > 0


def test_what_warms_up_leaves_no_trace_and_a_run_repeats(texts: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    family = block_families(128, 8, 2)["random"]
    first, again = (train_for(family, 1, SMALL, texts, CPU, steps=3, clock=Ticks(1.0)) for _ in range(2))
    monkeypatch.setattr("tune.quality.clock._warm_up", lambda *arguments: None)
    cold = train_for(family, 1, SMALL, texts, CPU, steps=3, clock=Ticks(1.0))
    assert first == again == cold
    assert first["steps"] == 3
    assert first["tail_loss"] != train_for(family, 2, SMALL, texts, CPU, steps=3, clock=Ticks(1.0))["tail_loss"]


def arguments(out: Path, text: Path, *more: str) -> list[str]:
    sizes = "--seq-len 128 --block 8 --batch 1 --width 32 --heads 2 --layers 1 --seconds 2 --seeds 0,1"
    return ["--out", str(out), "--text", str(text), *sizes.split(), "--families", "dense,random", *more]


def test_a_file_is_gone_on_with_and_nothing_is_run_twice(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "clock.jsonl"
    trained = []

    def counted(family: Family, seed: int, *rest: Any, **options: Any) -> Any:
        trained.append((family.name, seed, options["steps"]))
        return train_for(family, seed, *rest, **options)

    monkeypatch.setattr(quality_clock, "train_for", counted)
    assert main(arguments(out, text, "--seeds", "0"), clock=Ticks(1.0)) == 0
    lines = out.read_text(encoding="utf-8").splitlines()
    assert main(arguments(out, text, "--parts", "clock,tokens"), clock=Ticks(0.5)) == 0
    assert trained == [
        ("dense", 0, None), ("random", 0, None), ("random", 0, 2),
        ("dense", 1, None), ("random", 1, None), ("random", 1, 4),
    ]  # fmt: skip
    assert out.read_text(encoding="utf-8").splitlines()[: len(lines)] == lines
    signal = finished(out)["signal", "", 0]
    assert signal["held"] == quality_clock.NUM_HELD
    printed = capsys.readouterr().out
    assert "seed 0   seed 1" in printed
    assert main(arguments(out, text, "--stop-after", "-1", "--seeds", "5"), clock=Ticks(1.0)) == 0
    assert len(trained) == 6


def test_other_settings_another_text_and_unknown_names_are_refused_by_name(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, changed = tmp_path / "clock.jsonl", tmp_path / "changed.txt"
    assert main(arguments(out, text, "--seeds", "0", "--families", "random"), clock=Ticks(1.0)) == 0
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
        assert main(arguments(out, text, *more), clock=Ticks(1.0)) == 2
        assert message in capsys.readouterr().err


def test_patterns_that_gpus_cannot_run_are_refused_before_anything_is_trained() -> None:
    with pytest.raises(ValueError, match="128"):
        Attentions(block_families(1024, 32, 2)["random"], replace(SMALL, seq_len=1024, block=32), torch.device("cuda"))


def test_the_table_prints_gaps_to_dense_of_the_same_seed() -> None:
    def line(part: str, name: str, seed: int, tail: float, steps: int) -> dict[str, Any]:
        value = {"tail_loss": tail, "loss": tail, "train_loss": 0.5, "steps": steps, "tokens": 1, "epochs": 2.0,
                 "seconds": 60.0, "ms_per_step": 60e3 / steps, "rest_ms": 7.0, "density": 0.25}  # fmt: skip
        return {"part": part, "family": name, "seed": seed, "value": value}

    records = [
        line("clock", "dense", 0, 0.7, 1000), line("clock", "dense", 1, 0.8, 1000),
        line("clock", "random", 0, 0.65, 3000), line("clock", "random", 1, 0.85, 3000),
        line("clock", "random", 2, 0.9, 3000), line("tokens", "random", 0, 0.9, 1000),
    ]  # fmt: skip
    found = table({(r["part"], r["family"], r["seed"]): json.loads(json.dumps(r)) for r in records})
    rows = [row.split() for row in found if row.startswith("random")]
    assert rows[0][1:5] == ["0.250", "20.00", "7.00", "3000"]
    assert rows[0][-4:] == ["-0.0500", "+0.0500", "-", "+0.0000"]
    assert rows[1][-2:] == ["+0.2000", "+0.2000"]
