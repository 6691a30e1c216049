"""Tokenizers from a folder: trained here, saved, opened again; and Hugging Face datasets that were saved."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from elastic_ring.data.tokenizer import BYTES, PART_BYTES, open_tokenizer, parts_of
from tests.unit.data.corpora import prepared, texts, texts_of, tokens_of, trained_bpe, write_jsonl

tokenizers = pytest.importorskip("tokenizers")
END = "<|end|>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As `save_pretrained` lays it out."""
    made = trained_bpe(END)
    made.post_processor = tokenizers.processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    path = tmp_path / "tokenizer"
    path.mkdir()
    made.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": END}}))
    return path


def test_a_saved_tokenizer_gives_a_corpus_its_vocabulary_and_end(folder: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(40))
    manifest = prepared(tmp_path / "out", source, tokenizer=str(folder))
    saved = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert manifest.vocab_size == saved.get_vocab_size() == 400
    assert manifest.end_of_document == saved.token_to_id(END) == 0
    documents = tokens_of(tmp_path / "out", manifest.sources[0])
    assert [tokens[-1] for tokens in documents] == [0] * 40
    assert [saved.decode(tokens[:-1]) for tokens in documents] == texts(40)
    # No token of our own in front, as the tokenizer's template would put it.
    assert documents[3] == [*saved.encode(texts(40)[3], add_special_tokens=False).ids, 0]


def test_a_special_token_in_a_documents_text_is_text(folder: Path) -> None:
    tokens = open_tokenizer(str(folder)).encode([f"a{END}b".encode()])[0]
    assert 0 not in tokens
    saved = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert saved.decode(tokens.tolist()) == f"a{END}b"


def test_another_tokenizer_or_end_has_another_digest(folder: Path) -> None:
    first = open_tokenizer(str(folder))
    assert open_tokenizer(str(folder)).sha256 == first.sha256
    assert open_tokenizer(str(folder), "a").sha256 != first.sha256
    assert open_tokenizer(str(folder), "a").end_of_document != first.end_of_document
    (folder / "model.safetensors").write_bytes(b"a model beside it")
    (folder / "config.json").write_text("{}")
    assert open_tokenizer(str(folder)).sha256 == first.sha256
    plain = json.loads((folder / "tokenizer.json").read_text())
    plain["model"]["merges"].pop()
    (folder / "tokenizer.json").write_text(json.dumps(plain))
    assert open_tokenizer(str(folder)).sha256 != first.sha256


def test_what_is_no_tokenizer_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    with pytest.raises(ValueError, match=r"bare': holds no tokenizer\.json"):
        open_tokenizer(str(tmp_path / "bare"))
    with pytest.raises(ValueError, match="has no token '</s>'; say which one ends a document"):
        open_tokenizer(str(folder), "</s>")
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="names no eos_token"):
        open_tokenizer(str(folder))
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        open_tokenizer(str(folder), END)


def test_a_folder_without_tokenizer_json_is_opened_by_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(texts(200), vocab_size=400, special_tokens=[END], show_progress=False)
    folder = tmp_path / "gpt2"
    folder.mkdir()
    made.save_model(str(folder))  # vocab.json and merges.txt
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": END, "unk_token": END, "bos_token": END})
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    opened = open_tokenizer(str(folder))
    assert (opened.vocab_size, opened.end_of_document) == (made.get_vocab_size(), 0)
    documents = [text.encode() for text in texts(5)]
    assert [made.decode(tokens.tolist()) for tokens in opened.encode(documents)] == texts(5)
    assert opened.encode([]) == []


def test_text_that_is_no_utf8_is_bad_input_for_a_tokenizer_and_not_for_bytes(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("viele liebe Grüße an alle".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt: is no UTF-8"):
        prepared(tmp_path / "out", tmp_path / "latin.txt", tokenizer=str(folder))
    assert prepared(tmp_path / "bytes", tmp_path / "latin.txt", tokenizer=BYTES).num_tokens == 26


@pytest.mark.parametrize("sign", ["\n", " ", "", "ü"])
def test_a_long_document_is_cut_at_lines_words_or_characters(sign: str) -> None:
    document = (("häuser" + sign) * 400).encode()
    parts = list(parts_of(document, 100))
    assert b"".join(parts) == document
    assert max(map(len, parts)) <= 100
    assert min(map(len, parts[:-1])) > 80
    assert "".join(part.decode() for part in parts) == document.decode()
    if sign == "\n":
        assert all(part.endswith(b"\n") for part in parts)


def test_a_document_over_the_limit_keeps_its_text(folder: Path) -> None:
    document = "\n".join(texts(12_000)).encode()
    assert len(document) > PART_BYTES
    tokens = open_tokenizer(str(folder)).encode([b"short", document, b""])
    saved = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert saved.decode(tokens[1].tolist()) == document.decode()
    assert [array.dtype for array in tokens] == [np.dtype(np.int32)] * 3
    assert len(tokens[2]) == 0


def test_saved_hugging_face_datasets_are_read_in_their_order(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"text": texts(300)})
    whole.save_to_disk(tmp_path / "plain", num_shards=11)  # data-00010-of-00011 comes after data-00002-of-00011
    manifest = prepared(tmp_path / "out", tmp_path / "plain")
    assert texts_of(tmp_path / "out", manifest.sources[0]) == texts(300)
    split = datasets.DatasetDict({"train": whole.select(range(9, 3, -1)), "test": whole.select(range(2))})
    split.save_to_disk(tmp_path / "split")
    with pytest.raises(ValueError, match=r"holds the splits train, test: name one"):
        prepared(tmp_path / "out2", tmp_path / "split")
    manifest = prepared(tmp_path / "out2", tmp_path / "split" / "train")
    assert texts_of(tmp_path / "out2", manifest.sources[0]) == texts(300)[9:3:-1]


@pytest.mark.parametrize("content", [b'{"eos_token": ', b"[]", b"\xff\xfe{}"])
def test_a_damaged_tokenizer_config_is_named(folder: Path, content: bytes) -> None:
    (folder / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer='.*': tokenizer_config\.json cannot be read: "):
        open_tokenizer(str(folder))


def test_code_in_a_tokenizer_s_folder_does_not_run_though_a_terminal_would_say_yes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks on a terminal whether to run it, unless it is told."""
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    ran = folder / "ran"
    (folder / "tokenization_own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}, "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match="cannot be read"):
        open_tokenizer(str(folder))
    assert not ran.exists()
