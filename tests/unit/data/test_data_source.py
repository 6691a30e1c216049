"""Text sources: every token once, nothing of validation in training, bad input named."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from elastic_ring.attention.layouts.layout import contiguous
from elastic_ring.data import text
from elastic_ring.data.loader import IGNORE, slice_sample
from elastic_ring.data.packing import PackedSource
from elastic_ring.data.source import (
    BYTE_VOCAB_SIZE,
    END_OF_DOCUMENT,
    StdlibText,
    TextFiles,
    hold_out,
    open_source,
)
from elastic_ring.errors import StorageFailed

DOCUMENTS = (b"alpha", b"", b"be", b"gamma and more of it", b"d", b"epsilon")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index, content in enumerate(DOCUMENTS):
        (tmp_path / f"{index}.txt").write_bytes(content)
    return tmp_path


def expected_stream() -> tuple[list[int], list[int]]:
    """All tokens, and where documents begin in them, built the slow way."""
    stream: list[int] = []
    starts: list[int] = []
    for content in DOCUMENTS:
        if content:
            starts.append(len(stream))
            stream += [*content, END_OF_DOCUMENT]
    return stream, starts


@pytest.mark.parametrize("context_tokens", [1, 2, 3, 5, 7, 16])
@pytest.mark.parametrize("piece_bytes", [1, 4, 2**20])
def test_packing_uses_every_token_once_as_input_and_knows_each_document_start(
    folder: Path, context_tokens: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "PIECE_BYTES", piece_bytes)
    stream, starts = expected_stream()
    source = open_source(TextFiles(context_tokens, (str(folder),)))
    assert source.num_sequences == (len(stream) - 1) // context_tokens
    inputs: list[int] = []
    for sample_id in range(source.num_sequences):
        sample = source.read(sample_id)
        first = sample_id * context_tokens
        assert sample.tokens.dtype == np.int64
        assert sample.tokens.tolist() == stream[first : first + context_tokens + 1]
        inside = {start - first for start in starts if first <= start < first + context_tokens}
        assert sample.document_starts == tuple(sorted({0} | inside))
        assert sample.ends_document == (first + context_tokens in starts)
        inputs += sample.tokens[:-1].tolist()
    assert inputs == stream[: len(inputs)]
    assert len(stream) - len(inputs) <= context_tokens


def test_any_order_of_reads_and_a_cache_of_nothing_give_the_same_samples(folder: Path) -> None:
    config = TextFiles(3, (str(folder / "*.txt"),))
    source, bare = config.open(), config.open()
    bare._cache.limit_bytes = 0
    forward = [source.read(sample_id).tokens.tolist() for sample_id in range(source.num_sequences)]
    backward = [bare.read(sample_id).tokens.tolist() for sample_id in reversed(range(source.num_sequences))]
    assert forward == backward[::-1]


def test_loaded_chunks_stay_within_the_bound(tmp_path: Path) -> None:
    for index in range(20):
        (tmp_path / f"{index:02}.txt").write_bytes(b"x" * 1000)
    source = TextFiles(100, (str(tmp_path),)).open()
    source._cache.limit_bytes = 10_000
    for sample_id in range(source.num_sequences):
        source.read(sample_id)
        assert sum(future.result().num_bytes for future in source._cache._loaded.values()) <= 10_000


def test_the_standard_library_is_read_in_path_order_without_its_tests() -> None:
    source = StdlibText(512).open()
    root = Path(sysconfig.get_path("stdlib"))
    names = [source._cache.chunks[index].name for index in range(len(source._cache.chunks))]
    relative = [Path(name).relative_to(root).as_posix() for name in names]
    assert relative == sorted(relative)
    assert {"argparse.py", "json/decoder.py"} <= set(relative)
    assert not any({"site-packages", "test", "tests"} & set(Path(name).parts) for name in relative)
    first = Path(names[0]).read_bytes()
    assert bytes(source.read(0).tokens[: min(len(first), 512)].tolist()) == first[:512]
    assert source.num_sequences * 512 > 1_000_000
    last = source.read(source.num_sequences - 1).tokens
    assert last.min() >= 0
    assert last.max() < BYTE_VOCAB_SIZE


def test_two_openings_agree_and_a_changed_byte_context_or_order_shows(folder: Path) -> None:
    def fingerprint(config: TextFiles) -> str:
        return open_source(config).fingerprint

    config = TextFiles(4, (str(folder / "0.txt"), str(folder / "3.txt")))
    before = fingerprint(config)
    assert before == fingerprint(config)
    assert before != fingerprint(TextFiles(5, config.paths))
    assert before != fingerprint(TextFiles(4, config.paths[::-1]))
    (folder / "3.txt").write_bytes(DOCUMENTS[3].replace(b"more", b"MORE"))
    assert before != fingerprint(config)


def test_a_file_named_twice_counts_once(folder: Path) -> None:
    once = TextFiles(4, (str(folder),)).open()
    twice = TextFiles(4, (str(folder), str(folder / "*.txt"), str(folder / "3.txt"))).open()
    assert once.num_tokens == twice.num_tokens


def test_training_and_validation_share_no_sequence_and_no_target(folder: Path) -> None:
    source = open_source(TextFiles(3, (str(folder),)))
    training, validation = hold_out(source, num_sequences=4)
    assert training.num_sequences + validation.num_sequences == source.num_sequences
    seen = [training.read(i).tokens.tolist() for i in range(training.num_sequences)]
    held = [validation.read(i).tokens.tolist() for i in range(4)]
    assert seen + held == [source.read(i).tokens.tolist() for i in range(source.num_sequences)]
    assert training.fingerprint != validation.fingerprint
    for part in (training, validation):
        with pytest.raises(ValueError, match=f"sample_id={part.num_sequences}"):
            part.read(part.num_sequences)
    assert hold_out(source, fraction=0.01)[1].num_sequences == 1
    assert hold_out(source)[1].num_sequences == 0


@pytest.mark.parametrize(("fraction", "num_sequences"), [(1.0, None), (-0.1, None), (0.99, None), (0.0, 99)])
def test_holding_out_everything_is_refused(folder: Path, fraction: float, num_sequences: int | None) -> None:
    source = open_source(TextFiles(3, (str(folder),)))
    with pytest.raises(ValueError, match="validation"):
        hold_out(source, fraction=fraction, num_sequences=num_sequences)


def test_a_path_with_nothing_readable_is_named(folder: Path) -> None:
    for path in (str(folder / "absent.txt"), str(folder / "*.md"), "no-such-protocol://x"):
        with pytest.raises(ValueError, match=re.escape(path)):
            TextFiles(4, (path,)).open()
    with pytest.raises(ValueError, match="tuple of at least one"):
        TextFiles(4, ())
    with pytest.raises(ValueError, match="tuple of at least one"):
        TextFiles(4, str(folder))  # type: ignore[arg-type]


def test_a_corpus_shorter_than_one_sequence_is_empty(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"corpus is empty.*1001"):
        open_source(TextFiles(1000, (str(folder),)))
    with pytest.raises(ValueError, match="context_tokens=0"):
        StdlibText(0)


@pytest.mark.parametrize("content", [b"gamma", b"gamma and more of it, and more", None])
def test_a_file_that_changed_after_opening_is_named(folder: Path, content: bytes | None) -> None:
    source: PackedSource = TextFiles(3, (str(folder),)).open()
    if content is None:
        (folder / "3.txt").unlink()
    else:
        (folder / "3.txt").write_bytes(content)
    with pytest.raises(ValueError, match=r"3\.txt"):
        [source.read(i) for i in range(source.num_sequences)]


# ------------------------------------------------------------ documents that begin at multiples


@pytest.mark.parametrize("align_tokens", [2, 4, 8])
@pytest.mark.parametrize("piece_bytes", [1, 4, 2**20])
def test_aligned_documents_begin_at_multiples_and_what_fills_them_up_is_no_target(
    folder: Path, align_tokens: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "PIECE_BYTES", piece_bytes)
    source = open_source(TextFiles(8, (str(folder),), align_tokens))
    layout, learned = contiguous(8, 1), []
    for sample_id in range(source.num_sequences):
        sample = source.read(sample_id)
        assert all(start % align_tokens == 0 for start in sample.document_starts)
        targets = slice_sample(sample, layout, 0, sample_id=sample_id, index_in_batch=0).targets
        learned += targets[targets != IGNORE].tolist()
    # Every token of every document but its first is learned once, its end included; what fills up is not.
    wanted = [token for content in DOCUMENTS if content for token in [*content[1:], END_OF_DOCUMENT]]
    assert len(learned) >= len(wanted) - 8
    assert learned == wanted[: len(learned)]


def test_alignment_is_part_of_what_a_corpus_is_and_must_fit_the_context(folder: Path) -> None:
    paths = (str(folder),)
    prints = {TextFiles(8, paths, align).open().fingerprint for align in (1, 2, 4)}
    assert len(prints) == 3
    assert TextFiles(8, paths, 1).open().fingerprint == TextFiles(8, paths).open().fingerprint
    with pytest.raises(ValueError, match=r"align_tokens=3 with context_tokens=8: .* multiple"):
        TextFiles(8, paths, 3)
    with pytest.raises(ValueError, match=r"align_tokens=0: 1 fills nothing up"):
        StdlibText(8, 0)


def test_an_object_store_without_credentials_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """botocore finds no credentials and raises a class that is no OSError; nothing is sent."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageFailed, match=r"s3://bucket/texts.* cannot be (listed|opened|read)"):
        TextFiles(4, ("s3://bucket/texts",)).open()
