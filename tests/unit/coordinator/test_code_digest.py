"""Which code a run remembers: the source of the user's own, wherever it lies, and no library's."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
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
from elastic_ring.runtime.driver.submission import Submission

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


def test_comments_layout_places_and_what_is_not_used_change_no_digest(digests):
    before = digests()
    assert "" not in before
    moved = LOSS.replace("    return inner", "\n    # a comment\n    return  inner").replace("/some", "/other")
    assert digests("\n\n" + moved, HELPER.replace("UNUSED = 5", "UNUSED = 6"), "b") == before
    assert code_digest(language_model_loss) == code_digest(partial(Transformer, preset("laptop"))) == ""


def test_code_without_a_file_has_a_digest_as_a_lambda_on_a_shared_line_has():
    made: dict[str, Any] = {"__name__": "a_notebook"}
    for factor in (2, 3):
        exec(f"class M{factor}:\n    def f(self, x):\n        return x * {factor}\n", made)
    assert len({code_digest(made["M2"]), code_digest(made["M3"]), ""}) == 3
    one, two = (lambda x: x + 1), (lambda x: x + 2)
    assert code_digest(one) != code_digest(two)
    assert code_digest(one) == code_digest(lambda x: x + 1)


RICH = """
import contextlib, functools, logging, os, socket, sys
from dataclasses import dataclass
import torch
import helper

@dataclass
class Cfg:
    width: int = 8

class Net:
    made = 0
    def __init__(self):
        Net.made += 1
        self.text = "net one"

CFG = Cfg(64)
SIZES = {"depth": 3, "at": "/here"}
STEPS = [4]
STEPS += [5]
NETS = {"net": Net}
LIMIT: float = 2.5
HOST = socket.gethostname()
PLACES = ("/one", "~/two")
log = logging.getLogger(__name__)
doubled = lambda x: x in {"a", "b", "c"} or x * 7

@contextlib.contextmanager
def managed():
    yield 11

@functools.lru_cache
def cached(x):
    return x + 12

@torch.no_grad()
def still(x):
    return x + 13

def loss(model, batch):
    from helper import scaled
    global count
    count = 1
    log.info("%s %s %s", HOST, PLACES, __name__)
    with managed() as one:
        return scaled(cached(still(doubled(one)))) + CFG.width + SIZES["depth"] + STEPS[0] + LIMIT + count, NETS["net"]
count = 0
Model = Net
"""


@pytest.mark.parametrize(
    ("source", "old", "new", "which"),
    [
        (LOSS, "by=WEIGHT", "by=-WEIGHT", (True, False)),
        (LOSS, "WEIGHT = 0.5", "WEIGHT = 0.25", (True, False)),
        (LOSS, "torch.relu(batch)", "torch.tanh(batch)", (False, True)),
        (LOSS, "part > self.gain", "part < self.gain", (False, True)),
        (LOSS, "gain = 2.0", "gain = 3.0", (False, True)),
        (LOSS, "value * by", "value / by", (True, False)),
        (LOSS, "by: float = 1.0", "by: float = 2.0", (True, False)),
        (LOSS, "(2, 3)", "(4, 3)", (True, False)),
        (RICH, "yield 11", "yield 21", (True, False)),
        (RICH, "x + 12", "x + 22", (True, False)),
        (RICH, "x + 13", "x + 23", (True, False)),
        (RICH, "Cfg(64)", "Cfg(65)", (True, False)),
        (RICH, "width: int = 8", "width: int = 9", (True, False)),
        (RICH, '"depth": 3', '"depth": 4', (True, False)),
        (RICH, "STEPS += [5]", "STEPS += [6]", (True, False)),
        (RICH, "= 2.5", "= 2.25", (True, False)),
        (RICH, '"net one"', '"net two"', (True, True)),
        (RICH, "x * 7", "x * 8", (True, False)),
        (RICH, "value * by", "value / by", (True, False)),
    ],
)
def test_an_edit_changes_the_digest_of_what_reaches_it(digests, source, old, new, which):
    before = digests(source)
    after = digests(source.replace(old, new), HELPER.replace(old, new), "b")
    assert tuple(one != other for one, other in zip(before, after, strict=True)) == which


ASKED = """
import sys
from functools import partial
import users
users.HOST, users.count, users.Net.made = sys.argv[1:4]
from elastic_ring.runtime.code_digest import code_digest
print(code_digest(users.loss), code_digest(users.Net))
"""


def test_another_process_host_place_and_count_change_no_digest(tmp_path):
    found = set()
    for seed, folder in (("1", "a"), ("2", "site")):
        at = tmp_path / folder
        at.mkdir()
        rich = RICH.replace("/here", f"/{folder}").replace("/one", f"/{folder}")
        (at / "users.py").write_text(rich.replace("import torch\n", "").replace("@torch.no_grad()\n", ""))
        (at / "helper.py").write_text(HELPER)
        path = os.pathsep.join([str(at), *sys.path])
        asked = [sys.executable, "-c", ASKED, folder, seed, seed]
        env = {"PYTHONPATH": path, "PYTHONHASHSEED": seed}
        found.add(subprocess.run(asked, env=env, capture_output=True, text=True, check=True).stdout)
    assert len(found) == 1


def test_a_notebook_counts_settings_and_no_process_facts():
    def of(**values: Any) -> str:
        made: dict[str, Any] = {"__name__": "a_notebook", **values}
        exec("def f(x):\n    global COUNT\n    COUNT = 2\n    return WIDTH, D, COUNT, AT, __name__, x.step", made)
        return code_digest(made["f"])

    @dataclass
    class Cfg:
        layers: int

    usual = {"WIDTH": Cfg(3), "D": {"a": [1, 2]}, "COUNT": 0, "AT": "/here", "step": 1}
    assert of(**usual) == of(**{**usual, "COUNT": 5, "AT": "/there", "step": 2})
    assert len({of(**usual), of(**{**usual, "WIDTH": Cfg(4)}), of(**{**usual, "D": {"a": [1, 3]}})}) == 3


def test_libraries_wherever_they_lie_are_no_users_and_long_chains_are_followed(tmp_path):
    code = compile("def f(x):\n    return x", str(tmp_path / "env/lib/dist-packages/one.py"), "exec")
    made: dict[str, Any] = {"__name__": "one"}
    exec(code, made)
    assert code_digest(made["f"]) == ""
    chain: Any = digests
    for _ in range(3000):
        chain = [chain]
    assert code_digest(chain) == code_digest(digests) != ""


def test_submodules_are_followed_and_other_modules_names_are_not(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    def of(name: str, depth: str, other: str = "1") -> str:
        pack = tmp_path / name / "deep"
        pack.mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text("from .deep.last import DEPTH")
        (pack / "__init__.py").write_text("")
        (pack / "last.py").write_text(f"DEPTH = {depth}\nOTHER = {other}\ndef f(x):\n    return x * DEPTH\n")
        (tmp_path / name / "users.py").write_text(f"import {name}.deep.last\ndef g(x): return {name}.deep.last.f(x)\n")
        (tmp_path / name / "users2.py").write_text("from . import DEPTH as D\ndef g(x): return x * D\n")
        found = [code_digest(importlib.import_module(f"{name}.{one}").g) for one in ("users", "users2")]
        return " ".join(found)

    usual = of("packa", "3")
    assert "" not in usual.split(" ")
    assert of("packb", "3", "2").split()[1] == usual.split()[1]
    assert not set(of("packc", "4").split()) & set(usual.split())


def test_bytecode_of_two_pythons_is_not_compared():
    assert changed_parts({"loss": "py3.11:a"}, {"loss": "py3.12:b"}) == []
    assert changed_parts({"loss": "py3.12:a"}, {"loss": "py3.12:b"}) == ["loss"]
    assert changed_parts({"loss": "a", "model": "b"}, {"loss": "a"}) == ["model"]


def submission(folder: Path, factor: float, **run: Any) -> Submission:
    def loss(model: Any, batch: Any) -> Any:
        return factor * model(batch)

    (folder / "text.txt").write_text("some words " * 90)
    trainer = ElasticRingTrainer(
        partial(Transformer, preset("laptop")),
        TextFiles(64, (str(folder / "text.txt"),)),
        loss=loss,
        step_config=StepConfig(steps=2, context_tokens=64),
        run_config=RunConfig("edited", run_dir=str(folder / "run"), **run),
    )
    return trainer.submission().with_code()


def test_a_run_of_the_same_name_with_other_code_is_refused_with_three_ways_out(tmp_path, caplog):
    submission(tmp_path, 1.0).write_record()
    assert submission(tmp_path, 1.0).finished_summary() is None
    with pytest.raises(ValueError, match=r"other code of loss.*another name; .*--run\.code-changed.* remove"):
        submission(tmp_path, 2.0).finished_summary()
    assert submission(tmp_path, 2.0, resume="never").finished_summary() is None, "a new beginning may have any code"
    assert not caplog.messages
    with caplog.at_level(logging.WARNING):
        accepted = submission(tmp_path, 2.0, code_changed=True)
        assert accepted.finished_summary() is None
    assert "the code of loss has changed; it goes on with the new code" in caplog.text
    accepted.write_record()
    assert submission(tmp_path, 2.0).finished_summary() is None, "and then remembers that"


SCRIPT = """
from helper import scaled
from elastic_ring.runtime.code_digest import code_digest

STEPS = 100
UNUSED = lambda: 1

class Net:
    def forward(self, x):
        return scaled(x)

def loss(model, batch):
    return model.forward(batch) * 2

print(code_digest(Net), code_digest(loss), code_digest(lambda model, batch: loss(model, batch)))
"""


def test_a_script_may_change_its_comments_its_unused_code_and_its_steps_and_not_what_trains(tmp_path):
    def digests(script: str = SCRIPT, helper: str = HELPER) -> list[str]:
        (tmp_path / "helper.py").write_text(helper)
        (tmp_path / "script.py").write_text(script)
        env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, str(tmp_path / "script.py")]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()

    net, loss, closure = digests()
    assert digests(SCRIPT.replace("100", "200  # more").replace("lambda: 1", "lambda: 2")) == [net, loss, closure]
    assert digests(helper=HELPER.replace("value * by", "value - by"))[0] != net
    _, other_loss, other_closure = digests(SCRIPT.replace("(batch) * 2", "(batch) * 3"))
    assert (other_loss == loss, other_closure == closure) == (False, False)
