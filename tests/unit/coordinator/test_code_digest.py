"""Which code a run remembers: the source of the user's own, wherever it lies, and no library's."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elastic_ring import ElasticRingTrainer, RunConfig, StepConfig
from elastic_ring.data.source import TextFiles
from elastic_ring.model.config import preset
from elastic_ring.model.loss import language_model_loss
from elastic_ring.model.transformer import Transformer
from elastic_ring.runtime.code_digest import changed_parts, code_digest

HELPER = """
BLOCKS = (2, 3)
UNUSED = 5

def scaled(value, /, by: float = 1.0):
    return value * by
"""
LOSS = """
import torch
import helper
from helper import scaled

WEIGHT = 0.5
CACHE = "/some/place"

class Base:
    gain = 2.0
    def forward(self, x):
        return [part for part in x if part > self.gain]

class Model(Base):
    def __call__(self, batch):
        return torch.relu(batch)

def loss(model, batch):
    '''The loss.'''
    def inner(one):
        return scaled(one, by=WEIGHT) + helper.BLOCKS[0]
    return inner(batch), len(CACHE)
"""


@pytest.fixture
def digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, str]]:
    """Of `loss` and of `Model`, of modules with these sources in a folder of their own."""

    def load(folder: Path, name: str, source: str) -> Any:
        folder.mkdir(exist_ok=True)
        path = folder / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    def of(loss: str = LOSS, helper: str = HELPER, folder: str = "a") -> tuple[str, str]:
        load(tmp_path / folder, "helper", helper)
        made = load(tmp_path / folder, "users", loss)
        return code_digest(partial(made.loss, 3)), code_digest(made.Model)

    return of


def test_comments_layout_places_and_what_is_not_used_change_no_digest(digests: Callable[..., tuple[str, str]]) -> None:
    before = digests()
    assert "" not in before
    moved = LOSS.replace("    return inner", "\n    # a comment\n    return  inner").replace("/some", "/other")
    assert digests("\n\n" + moved, HELPER.replace("UNUSED = 5", "UNUSED = 6"), "b") == before
    assert code_digest(language_model_loss) == code_digest(partial(Transformer, preset("laptop"))) == ""


@pytest.mark.parametrize(
    ("old", "new", "which"),
    [
        ("by=WEIGHT", "by=-WEIGHT", (True, False)),
        ("WEIGHT = 0.5", "WEIGHT = 0.25", (True, False)),
        ("torch.relu(batch)", "torch.tanh(batch)", (False, True)),
        ("part > self.gain", "part < self.gain", (False, True)),
        ("gain = 2.0", "gain = 3.0", (False, True)),
        ("value * by", "value / by", (True, False)),
        ("by: float = 1.0", "by: float = 2.0", (True, False)),
        ("(2, 3)", "(4, 3)", (True, False)),
    ],
)
def test_an_edit_changes_the_digest_of_what_uses_it(
    digests: Callable[..., tuple[str, str]], old: str, new: str, which: tuple[bool, bool]
) -> None:
    before = digests()
    after = digests(LOSS.replace(old, new), HELPER.replace(old, new), "b")
    assert tuple(one != other for one, other in zip(before, after, strict=True)) == which


def test_code_without_a_file_has_a_digest_as_a_lambda_on_a_shared_line_has() -> None:
    made: dict[str, Any] = {"__name__": "a_notebook"}
    for factor in (2, 3):
        exec(f"class M{factor}:\n    def f(self, x):\n        return x * {factor}\n", made)
    assert len({code_digest(made["M2"]), code_digest(made["M3"]), ""}) == 3
    one, two = (lambda x: x + 1), (lambda x: x + 2)
    assert code_digest(one) != code_digest(two)
    assert code_digest(one) == code_digest(lambda x: x + 1)


def trainer(folder: Path, factor: float, **run: Any) -> ElasticRingTrainer:
    def loss(model: Any, batch: Any) -> Any:
        return factor * model(batch)

    (folder / "text.txt").write_text("some words " * 90)
    return ElasticRingTrainer(
        partial(Transformer, preset("laptop")),
        TextFiles(64, (str(folder / "text.txt"),)),
        loss=loss,
        step_config=StepConfig(steps=2, context_tokens=64),
        run_config=RunConfig("edited", run_dir=str(folder / "run"), **run),
    )


def test_a_run_of_the_same_name_with_other_code_is_refused_with_three_ways_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(tmp_path, 1.0)._write_config()
    assert trainer(tmp_path, 1.0)._finished() is None
    with pytest.raises(ValueError, match=r"other code of loss.*another name; .*--run\.code-changed.* remove"):
        trainer(tmp_path, 2.0)._finished()
    assert trainer(tmp_path, 2.0, resume="never")._finished() is None, "who begins anew may have any code"
    assert not caplog.messages
    with caplog.at_level(logging.WARNING):
        accepted = trainer(tmp_path, 2.0, code_changed=True)
        assert accepted._finished() is None
    assert "the code of loss has changed; it goes on with the new code" in caplog.text
    accepted._write_config()
    assert trainer(tmp_path, 2.0)._finished() is None, "and then remembers that"
    assert changed_parts({"loss": "a", "model": "b"}, {"loss": "a"}) == ["model"]
