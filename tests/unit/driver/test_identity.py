"""A run's identity holds what it trains on, never where that lies."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from elastic_ring import ElasticRingTrainer, RunConfig, StepConfig
from elastic_ring.data.sampling.validation import ValidationSet
from elastic_ring.data.source import PreparedTokens, SourceConfig, StdlibText, TextFiles, TokenShards
from elastic_ring.model.config import preset
from elastic_ring.model.transformer import Transformer
from elastic_ring.monitor.journal import Journal
from elastic_ring.monitor.metrics import write_json
from elastic_ring.runtime.driver.attach import has_records_of
from elastic_ring.runtime.driver.submission import Submission
from elastic_ring.runtime.identity import Identity, identity_of
from elastic_ring.train.optim import OptimConfig
from elastic_ring.train.task import TrainingTask
from tests.unit.data.corpora import prepared, texts, write_jsonl

CONTEXT = 64


def text_files(folder: Path) -> SourceConfig:
    folder.mkdir()
    (folder / "one.txt").write_text("some words " * 50)
    return TextFiles(CONTEXT, (str(folder),))


def token_shards(folder: Path) -> SourceConfig:
    folder.mkdir()
    pq.write_table(pa.table({"tokens": [[number % 256] * 60 for number in range(9)]}), folder / "one.parquet")
    return TokenShards(CONTEXT, str(folder))


def prepared_tokens(folder: Path) -> SourceConfig:
    folder.mkdir()
    prepared(folder / "out", write_jsonl(folder / "a.jsonl", texts(40)))
    return PreparedTokens.of(str(folder / "out" / "manifest.json"), CONTEXT)


SOURCES = [text_files, token_shards, prepared_tokens]


def submission(data: SourceConfig, folder: Path) -> Submission:
    step = StepConfig(steps=2, context_tokens=CONTEXT)
    run = RunConfig("moved", run_dir=str(folder))
    return ElasticRingTrainer(
        partial(Transformer, preset("laptop")), data, step_config=step, run_config=run
    ).submission()


def elsewhere(data: Any, old: Path, new: Path) -> Any:
    """The same source, with its place under another folder."""
    name = "paths" if isinstance(data, TextFiles) else "uri"
    at = getattr(data, name)
    moved = at.replace(str(old), str(new)) if name == "uri" else tuple(p.replace(str(old), str(new)) for p in at)
    return replace(data, **{name: moved})


@pytest.mark.parametrize("source", SOURCES)
def test_a_copy_elsewhere_is_the_same_run_and_is_told_and_other_contents_are_refused_by_name(source, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    a, b, run = tmp_path / "a", tmp_path / "b", tmp_path / "run"
    data = source(a)
    first = submission(data, run)
    first.write_record()
    run = run.rename(tmp_path / "moved run")
    shutil.copytree(a, b)
    second = submission(elsewhere(data, a, b), run)
    assert second.finished_summary() is None
    assert (second.identity.entries, second.digest) == (first.identity.entries, first.digest)
    assert not any(str(tmp_path) in text for text in second.identity.entries.values())
    second._log_moved(second.find_resume().places)
    assert f"data was at {a}"[:50] in caplog.messages[-1]
    assert str(b)[:30] in caplog.messages[-1]
    assert "; run was at " in caplog.messages[-1]
    (other := tmp_path / "other").mkdir()
    changed = {text_files: TextFiles(CONTEXT, (str(other),)), token_shards: TokenShards(CONTEXT, str(other))}
    if source is prepared_tokens:
        prepared(other / "out", write_jsonl(other / "a.jsonl", texts(41)))
        changed[source] = PreparedTokens.of(str(other / "out" / "manifest.json"), CONTEXT)
    (other / "one.txt").write_text("other words " * 50)
    pq.write_table(pa.table({"tokens": [[7] * 61] * 9}), other / "one.parquet")
    if source is text_files:
        (other / "one.parquet").unlink()
    named = {text_files: r"one\.txt", token_shards: r"one\.parquet", prepared_tokens: r"000-"}[source]
    with pytest.raises(ValueError, match=rf"with other settings .*, in files of the data: .*{named}.*; data: \w+ \w+"):
        submission(changed[source], run).finished_summary()


def test_validation_sets_count_by_their_contents_wherever_they_lie(tmp_path):
    data = text_files(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")

    def of(folder: str, weight: float = 1.0) -> str:
        sets = {"own": ValidationSet(TextFiles(CONTEXT, (str(tmp_path / folder),)), weight)}
        step = StepConfig(steps=2, context_tokens=CONTEXT, val_every_steps=1)
        run = RunConfig("sets", run_dir=str(tmp_path / "run"))
        model = partial(Transformer, preset("laptop"))
        return ElasticRingTrainer(model, data, step_config=step, run_config=run, validation=sets).submission().digest

    assert of("a") == of("b") != of("a", 2.0)
    (tmp_path / "b" / "one.txt").write_text("other words " * 50)
    assert of("a") != of("b")
    with pytest.raises(ValueError, match=r"^validation own: --data .*none: there is no such file"):
        of("none")


def test_a_finished_run_needs_its_data_no_more(tmp_path):
    data = text_files(tmp_path / "a")
    submission(data, tmp_path / "run").write_record()
    write_json(tmp_path / "run" / "summary.json", {"steps": 2})
    (tmp_path / "run" / "weights.safetensors").touch()
    shutil.rmtree(tmp_path / "a")
    assert submission(data, tmp_path / "run").finished_summary() is not None
    with pytest.raises(ValueError, match="no such file"):
        submission(replace(data, align_tokens=2), tmp_path / "run").finished_summary()
    with pytest.raises(ValueError, match="no such file"):
        submission(elsewhere(data, tmp_path / "a", tmp_path / "b"), tmp_path / "run").finished_summary()


def test_what_differs_is_named(tmp_path):
    own = submission(text_files(tmp_path / "a"), tmp_path / "run").identity
    assert own.differences(own.entries) == []
    told = own.differences({**own.entries, "step.seed": "3", "pattern": "w" * 100})
    assert told == [f"pattern: {'w' * 60}... there,  here", "step.seed: 3 there, 0 here"]


def test_slices_that_a_model_is_built_in_are_part_of_it():
    def identity(name: str) -> Identity:
        task = TrainingTask(partial(Transformer, preset(name)), StdlibText(CONTEXT), StepConfig(), OptimConfig())
        return identity_of(task, {}, {}, "")

    sliced, whole = (identity(name).entries["slices of the model"] for name in ("1t", "70b"))
    assert sliced != whole == "{}"
    with torch.device("meta"):
        for config in (replace(preset(name), num_layers=2) for name in ("1t", "70b", "1t-moe")):
            names = [name for name, _ in Transformer(config).named_parameters()]
            assert {part for part in ("ffn", "head") if any(f"{part}.1." in name for name in names)} == {*config.sliced}


def test_a_running_run_is_known_by_its_records_where_its_folder_has_another_path(tmp_path):
    run = RunConfig("here", run_dir=str(tmp_path / "link"))
    (tmp_path / "folder").mkdir()
    assert not has_records_of(run, "a1")
    os.symlink(tmp_path / "folder", tmp_path / "link")
    with Journal(tmp_path / "folder" / "journal.jsonl") as journal:
        journal.append({"note": "begin", "attempt": "a1"})
    assert has_records_of(run, "a1")
    assert not has_records_of(run, "a2")
