"""Datasets given to the trainer: written out once, found again, refused where they cannot be replayed."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from elastic_ring import RunConfig, StepConfig
from elastic_ring.data.manifest import read_manifest
from elastic_ring.data.packing import END_OF_DOCUMENT
from elastic_ring.data.preparation import prepare
from elastic_ring.data.preparation.materialise import DatasetTokens, as_source, materialised
from elastic_ring.data.source import StdlibText
from elastic_ring.runtime.driver import submission
from elastic_ring.trainer import ElasticRingTrainer
from tests.unit.data.corpora import texts, trained_bpe
from tests.unit.data.test_chat import (
    CLOSE,
    END,
    OPEN,
    THINKS,
    THOUGHT,
    chat,
    counted_of,
    counted_text,
    messages,
    with_template,
    write,
)

datasets = pytest.importorskip("datasets")


def dataset(rows: list[str | None], column: str = "text") -> Any:
    return datasets.Dataset.from_dict({"id": list(range(len(rows))), column: rows})


def stream(source: Any) -> list[int]:
    opened = source.open()
    return [token for i in range(opened.num_sequences) for token in opened.read(i).tokens[:-1].tolist()]


def test_a_hugging_face_dataset_is_written_out_once_in_its_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = dataset([*texts(40), None, ""]).select([*range(41, -1, -1)])
    uri = str(tmp_path / "run-data")
    source = as_source(whole, StepConfig(context_tokens=8))
    with caplog.at_level(logging.INFO):
        first = materialised(source, uri)
    assert f"the Hugging Face dataset is written to {uri} and prepared there" in caplog.text
    expected = [token for text in reversed(texts(40)) for token in (*text.encode(), END_OF_DOCUMENT)]
    assert stream(first) == expected[: (len(expected) - 1) // 8 * 8]
    assert not (tmp_path / "run-data" / "input").exists()
    with caplog.at_level(logging.INFO):
        assert materialised(source, uri) == first
    assert "written by an earlier submission" in caplog.text


def test_a_kill_while_it_is_written_leaves_nothing_that_counts(tmp_path: Path) -> None:
    uri = str(tmp_path / "run-data")
    left = tmp_path / "run-data" / "input" / "part-000009.parquet"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half of a file")
    source = as_source(dataset(texts(40)), StepConfig(context_tokens=8))
    calm = materialised(source, str(tmp_path / "calm-data"))
    assert materialised(source, uri).digest == calm.digest


def test_other_documents_settings_or_order_under_the_same_run_are_refused(tmp_path: Path) -> None:
    uri = str(tmp_path / "run-data")
    materialised(as_source(dataset(texts(40)), StepConfig(context_tokens=8)), uri)
    for other in (texts(39), [*texts(39), "x"], [*texts(40)[::-1]], [texts(2)[0] + texts(2)[1], "", *texts(38, 2)]):
        with pytest.raises(ValueError, match="has other documents, or another order"):
            materialised(as_source(dataset(other), StepConfig(context_tokens=8)), uri)
    with pytest.raises(ValueError, match=r"'align_tokens': 1.*not .*'align_tokens': 8"):
        materialised(DatasetTokens(dataset(texts(40)), 8, align_tokens=8), uri)


def test_a_dataset_without_text_is_refused_by_its_columns(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no column 'text': it has id, body; give DatasetTokens"):
        materialised(as_source(dataset(texts(3), "body"), StepConfig(context_tokens=8)), str(tmp_path / "a"))
    with pytest.raises(ValueError, match="has no rows"):
        materialised(as_source(dataset([]), StepConfig(context_tokens=8)), str(tmp_path / "b"))
    assert materialised(DatasetTokens(dataset(texts(3), "body"), 8, text_column="body"), str(tmp_path / "c")).digest


def test_conversations_of_a_dataset_or_a_list_have_the_masks_of_their_file(tmp_path: Path) -> None:
    """Rows of a table have nulls where others have keys; what is no conversation's column is not read."""
    folder = with_template(trained_bpe(END, OPEN, CLOSE), tmp_path / "tokenizer", THINKS)
    tools = json.dumps([{"name": "look", "parameters": {}}])
    rows: list[dict[str, Any]] = [{"messages": THOUGHT, "tools": tools}, {"messages": messages("a", "b", "c", "d")}]
    rows[1]["messages"][1] |= {"weight": 0}
    given = [{"id": number, **row, "at": datetime.now(UTC)} for number, row in enumerate(rows)]
    of_file = chat(tmp_path / "out", write(tmp_path / "a.jsonl", rows), folder)
    settings: dict[str, Any] = {"tokenizer": str(folder), "chat": True}
    for name, data in {"list": given, "table": datasets.Dataset.from_list(given)}.items():
        corpus = materialised(DatasetTokens(data, 64, **settings), str(tmp_path / name))
        manifest = read_manifest(corpus.uri)
        assert counted_of(tmp_path / name / "tokens", manifest) == counted_of(tmp_path / "out", of_file)
        assert materialised(DatasetTokens(data, 64, **settings), str(tmp_path / name)) == corpus
    with pytest.raises(ValueError, match="has other documents, or another order"):
        materialised(DatasetTokens(given[::-1], 64, **settings), str(tmp_path / "list"))
    named = datasets.Dataset.from_list([{"q": "a", "a": "b"}])
    with pytest.raises(ValueError, match=r"no column 'messages' or .*: it has q, a; give .*columns="):
        materialised(DatasetTokens(named, 64, **settings), str(tmp_path / "other"))
    columns = "prompt=q,completion=a"
    corpus = materialised(DatasetTokens(named, 4, columns=columns, **settings), str(tmp_path / "named"))
    (document,) = counted_of(tmp_path / "named" / "tokens", read_manifest(corpus.uri))
    assert counted_text(folder, document) == f"b{CLOSE}"
    for wrong, told in (
        ({"chat": True}, "bytes have no chat template"),
        ({"columns": columns}, "are of conversations"),
    ):
        with pytest.raises(ValueError, match=told):
            DatasetTokens(named, 64, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has rows that are no mapping"):
        DatasetTokens(["a"], 64, **settings)


def test_a_large_dataset_is_prepared_in_the_ray_of_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose token is looked after."""

    def session(num_cpus: int) -> Any:
        raise InterruptedError("asked for")

    monkeypatch.setattr(prepare, "SMALL_BYTES", 0)
    monkeypatch.setattr(submission, "cluster", session)
    run, step = RunConfig("large", run_dir=str(tmp_path / "large")), StepConfig(context_tokens=8)
    made = ElasticRingTrainer(dict, dataset(texts(40)), step_config=step, run_config=run)  # type: ignore[arg-type]
    with pytest.raises(InterruptedError, match="asked for"):
        made.fit()


class Endless(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[str]:
        yield "x"


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (iter(["a"]), "data is an iterator, which can be read only once"),
        ((text for text in ["a"]), "data is an iterator"),
        (Endless(), "data is an IterableDataset of torch"),
        (DataLoader(["a"]), "data is a DataLoader"),  # type: ignore[arg-type]
        (dataset(["a"]).to_iterable_dataset(), "data is a streamed Hugging Face dataset"),
        (datasets.DatasetDict(train=dataset(["a"])), "data is a DatasetDict of train: give one of its datasets"),
        (["a"], "data is a list: give StdlibText"),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_the_reason(data: Any, told: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        ElasticRingTrainer(dict, data)  # type: ignore[arg-type]
    assert told in str(refused.value)


def test_sources_stay_what_they_are() -> None:
    source = StdlibText(8)
    assert as_source(source, StepConfig(context_tokens=4)) is source
    with pytest.raises(ValueError, match="DatasetTokens dataset is a list"):
        DatasetTokens([], 8)
    with pytest.raises(ValueError, match=r"is opened by ElasticRingTrainer\.fit"):
        as_source(dataset(["a"]), StepConfig(context_tokens=8)).open()
