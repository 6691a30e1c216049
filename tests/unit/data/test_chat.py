"""Conversations become tokens and a mask: what counts, in the shards, in the digests, in slices and in the loss."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.cli import data as command
from elastic_ring.config import StepConfig
from elastic_ring.data.loader import IGNORE, slice_sample
from elastic_ring.data.manifest import Manifest, digest_of, read_manifest
from elastic_ring.data.preparation import chat as rendering
from elastic_ring.data.preparation.piece import PieceWorker
from elastic_ring.data.prepared import PreparedCorpus, PreparedTokens
from elastic_ring.data.shards import TokenShards
from elastic_ring.data.tokenizer import open_tokenizer
from elastic_ring.errors import ElasticRingError
from elastic_ring.integrations.transformers import ring_model
from elastic_ring.model.loss import language_model_loss
from elastic_ring.train.optim import OptimConfig
from elastic_ring.train.task import TrainingTask, attention_of, batch_of
from tests.unit.data.corpora import prepared, texts, tokens_of, trained_bpe
from tests.unit.data.test_whole import trained

tokenizers = pytest.importorskip("tokenizers")
T = pytest.importorskip("transformers")
END, OPEN, CLOSE = "<|end|>", "<|open|>", "<|close|>"
ANSWER = "{{ message.content }}" + CLOSE
PLAIN = (
    "{% for message in messages %}" + OPEN + "{{ message.role }}\n" + ANSWER + "{% endfor %}"
    "{% if add_generation_prompt %}" + OPEN + "assistant\n{% endif %}"
)
MARKED = PLAIN.replace(
    ANSWER,
    "{% if message.role == 'assistant' %}{% generation %}"
    + ANSWER
    + "{% endgeneration %}{% else %}"
    + ANSWER
    + "{% endif %}",
)
ENDS = PLAIN.replace(CLOSE, "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}")
LAST_ONLY = PLAIN.replace(OPEN, "{% if loop.last %}thinks{% endif %}" + OPEN, 1)
"""Writes something before the last message alone, as templates do that leave out what was thought before."""
ASKED, SAID = texts(12), texts(12, 12)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with `MARKED` as its template."""
    return with_template(trained_bpe(END, OPEN, CLOSE), tmp_path_factory.mktemp("tokenizers") / "marked", MARKED)


def with_template(made: Any, folder: Path, template: str | None) -> Path:
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def other(saved: Path, folder: Path, template: str | None) -> Path:
    return with_template(tokenizers.Tokenizer.from_file(str(saved / "tokenizer.json")), folder, template)


def messages(*contents: str) -> list[dict[str, Any]]:
    """From the user and the assistant by turns."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def conversations() -> list[list[dict[str, Any]]]:
    """Some of one answer, some of two."""
    return [messages(ASKED[i], SAID[i], *((ASKED[i + 1], SAID[i + 1]) if i % 2 else ())) for i in range(10)]


def write(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(records)), path, row_group_size=3)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def chat(out: Path, source: Path, folder: Path, **settings: Any) -> Manifest:
    return prepared(out, source, tokenizer=str(folder), chat=True, **settings)


def counted_of(out: Path, manifest: Manifest) -> list[list[tuple[int, bool]]]:
    """(token, whether it counts) of each document, by the shards' own columns."""
    flags: list[bool] = []
    for shard in manifest.sources[0].shards:
        table = pq.read_table(out / "shards" / shard.name)
        flags += [flag for row in table["counted"].to_pylist() for flag in row]
        assert shard.num_counted == sum(flag for row in table["counted"].to_pylist() for flag in row)
    rest = iter(flags)
    return [[(token, next(rest)) for token in document] for document in tokens_of(out, manifest.sources[0])]


def counted_text(saved: Path, document: list[tuple[int, bool]]) -> str:
    opened = tokenizers.Tokenizer.from_file(str(saved / "tokenizer.json"))
    text: str = opened.decode([token for token, counts in document if counts], skip_special_tokens=False)
    return text


def of_sharegpt(conversation: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [{"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in conversation]


# ------------------------------------------------------------ what counts


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "by prefixes"])
def test_assistant_turns_count_and_nothing_else_whatever_the_records_are_called(
    saved: Path, tmp_path: Path, template: str
) -> None:
    folder = other(saved, tmp_path / "tokenizer", template)
    forms = {
        "messages.jsonl": [{"messages": each, "id": 3} for each in conversations()],
        "sharegpt.jsonl": [{"conversations": of_sharegpt(each)} for each in conversations()],
        "table.parquet": [{"messages": each, "prompt": None} for each in conversations()],
    }
    made = {name: chat(tmp_path / name[:4], write(tmp_path / name, rows), folder) for name, rows in forms.items()}
    documents = counted_of(tmp_path / "mess", made["messages.jsonl"])
    assert len(documents) == 10
    reference = T.AutoTokenizer.from_pretrained(saved)  # whose template writes the same
    for document, conversation in zip(documents, conversations(), strict=True):
        right = reference.apply_chat_template(conversation, return_assistant_tokens_mask=True)
        assert document == [*zip(right["input_ids"], map(bool, right["assistant_masks"]), strict=True), (0, False)]
        answers = [message["content"] for message in conversation if message["role"] == "assistant"]
        assert counted_text(saved, document) == "".join(answer + CLOSE for answer in answers)
    assert counted_of(tmp_path / "tabl", made["table.parquet"]) == documents
    assert counted_of(tmp_path / "shar", made["sharegpt.jsonl"]) == documents


def test_of_a_prompt_and_its_completion_the_completion_counts(saved: Path, tmp_path: Path) -> None:
    records = [
        {"prompt": "one", "completion": "two"},
        {"prompt": messages("one", "two", "three"), "completion": [{"role": "assistant", "content": "four"}]},
    ]
    for name, template in (("marked", MARKED), ("plain", PLAIN)):
        folder = other(saved, tmp_path / f"{name}-tokenizer", template)
        manifest = chat(tmp_path / name, write(tmp_path / f"{name}.jsonl", records), folder)
        found = [counted_text(saved, document) for document in counted_of(tmp_path / name, manifest)]
        assert found == ["two" + CLOSE, "four" + CLOSE]
    pq.write_table(pa.table({"prompt": ["one"], "completion": ["two"], "extra": ["x"]}), tmp_path / "a.parquet")
    manifest = chat(tmp_path / "table", tmp_path / "a.parquet", saved)
    assert [counted_text(saved, each) for each in counted_of(tmp_path / "table", manifest)] == ["two" + CLOSE]
    single = tmp_path / "one.json"
    single.write_text(json.dumps({"prompt": "one", "completion": "two"}, indent=1))
    assert chat(tmp_path / "single", single, saved).num_documents == 1


CALLS = PLAIN.replace(
    ANSWER,
    "{% for call in message.tool_calls or [] %}<call>WRITES</call>{% endfor %}{{ message.content or '' }}" + CLOSE,
)


@pytest.mark.parametrize(
    "writes",
    [
        "{{ call.function.arguments | tojson }}",
        "{{ '' + call.function.arguments }}",
        "{{ call.function.arguments }}",
        "{% if call.id | length != 9 or messages[0].content | length == 0 %}{{ raise_exception('no') }}{% endif %}"
        "{{ call.function.arguments | tojson }}",
        "{% if call.function.arguments is string %}{{ call.function.arguments }}{% else %}"
        "{{ call.function.arguments | tojson }}{% endif %}",
    ],
    ids=["a mapping", "text", "text, or a mapping as Python writes it", "strict", "either"],
)
def test_arguments_of_a_call_are_written_once_whether_a_record_has_a_mapping_or_its_text(
    saved: Path, tmp_path: Path, writes: str
) -> None:
    folder = other(saved, tmp_path / "tokenizer", CALLS.replace("WRITES", writes))
    for number, arguments in enumerate(({"city": "Bern"}, '{"city": "Bern"}')):
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": arguments}}
        turns = [messages("one")[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
        path = write(tmp_path / f"{number}.jsonl", [{"messages": turns}])
        manifest = chat(tmp_path / f"out{number}", path, folder)
        (document,) = counted_of(tmp_path / f"out{number}", manifest)
        assert counted_text(saved, document) == f'<call>{{"city": "Bern"}}</call>{CLOSE}'


BOMBS = {
    "text": "{{ 'a' * 10**9 }}",
    "formatted": "{{ '%300000000d' % 1 }}",
    "doubled": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "compared": "{% set n = namespace(a=[], b=[]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}"
    "{% set n.b = [n.b, n.b] %}{% endfor %}{{ n.a == n.b }}",
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=list(BOMBS))
def test_a_template_beyond_its_bounds_is_refused_by_name(saved, tmp_path, bomb, monkeypatch) -> None:
    """No operator of it need be forbidden, and what it runs need not be Python's own loops."""
    monkeypatch.setattr(rendering, "_IDLE", {})
    monkeypatch.setattr(rendering, "RENDER_S", 0.5)
    monkeypatch.setattr(rendering, "RENDER_BYTES", 256 << 20)
    folder = other(saved, tmp_path / "tokenizer", PLAIN + bomb)
    source = write(tmp_path / "a.jsonl", [{"messages": messages("one", "two")}])
    with pytest.raises(ValueError, match=rf"tokenizer='{folder}': its chat template takes over 0.5 s, 256 MiB of"):
        chat(tmp_path / "out", source, folder)


def test_a_process_for_templates_that_does_not_begin_is_no_templates_fault(saved, monkeypatch) -> None:
    monkeypatch.setattr(rendering, "_IDLE", {})
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(ElasticRingError, match=r"did not begin.*exit status 1"):
        rendering.ChatTokenizer(str(saved), None)


def test_a_conversation_that_takes_a_template_beyond_its_bounds_is_left_out_alone(saved, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(rendering, "_IDLE", {})
    monkeypatch.setattr(rendering, "RENDER_S", 0.5)
    bomb = "{% if messages[0].content == 'bomb' %}" + BOMBS["loops"] + "{% endif %}"
    folder = other(saved, tmp_path / "tokenizer", PLAIN + bomb)
    turns = [messages("one", "two"), messages("bomb", "two"), messages("three", "four")]
    source = write(tmp_path / "a.jsonl", [{"messages": each} for each in turns])
    manifest = chat(tmp_path / "out", source, folder, on_bad_input="skip", max_bad_share=0.5)
    assert [counted_text(saved, each) for each in counted_of(tmp_path / "out", manifest)] == [
        f"two{CLOSE}",
        f"four{CLOSE}",
    ]
    assert os.getpid() in rendering._IDLE, "and its process renders on"
    assert re.search(r"a\.jsonl.*its chat template takes over 0.5 s", manifest.dropped.bad[0])


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "by prefixes"])
def test_messages_that_a_record_leaves_out_of_the_loss_are_masked_and_its_system_is_its_first_message(
    saved: Path, tmp_path: Path, template: str
) -> None:
    """Equal text is a duplicate only where the same turns count."""
    folder = other(saved, tmp_path / "tokenizer", template)
    names = ("one", "two", "three", "four", "five", "six")
    marked: list[dict[str, Any]] = [
        *({"weight": weight} for weight in (0, 0.0, 1, None)),
        *({key: flag} for key in ("train", "loss") for flag in (False, True)),
        {"weight": 1, "train": False},
    ]
    rows: list[dict[str, Any]] = [{"messages": messages(*names)} for _ in marked]
    for row, keys in zip(rows, marked, strict=True):
        row["messages"][3] |= keys
    rows.append({"system": "be brief", "conversations": of_sharegpt(messages("one", "two"))})
    rows[-1]["conversations"][0]["weight"] = 0  # of a turn that does not count anyway
    rows.append({"system": "be brief", "messages": [{"role": "system", "content": "be brief"}, *messages("a", "b")]})
    rows.append({"system": "be brief", "prompt": "one", "completion": "two"})
    rows.append({"system": "", "messages": [{"role": "developer", "content": "terse"}, *messages("a", "b")]})
    rows.append({"messages": messages("one", "two", "three")[1:]})
    rows[-1]["messages"].append({"role": "assistant", "content": "four", "weight": 0})
    if template == PLAIN:
        rows.pop()
    manifest = chat(tmp_path / "out", write(tmp_path / "a.jsonl", rows), folder)
    documents = counted_of(tmp_path / "out", manifest)
    all_turns, masked = (f"two{CLOSE}four{CLOSE}six{CLOSE}", f"two{CLOSE}six{CLOSE}")
    expected = [masked, masked, all_turns, all_turns, masked, all_turns, masked, all_turns, masked]
    expected += [
        f"two{CLOSE}",
        f"b{CLOSE}",
        f"two{CLOSE}",
        f"b{CLOSE}",
        *([f"two{CLOSE}"] if template == MARKED else []),
    ]
    assert [counted_text(saved, document) for document in documents] == expected
    decoded = tokenizers.Tokenizer.from_file(str(saved / "tokenizer.json"))
    whole = [decoded.decode([token for token, _ in each], skip_special_tokens=False) for each in documents]
    assert [text.count(f"{OPEN}system\nbe brief{CLOSE}") for text in whole[9:13]] == [1, 1, 1, 0]
    assert whole[9] == whole[11]
    once = chat(tmp_path / "once", tmp_path / "a.jsonl", folder, drop_duplicates=True)
    assert once.dropped.num_duplicates == 8, "of nine two remain, and a prompt is its conversation's"


def test_an_end_that_the_template_writes_is_the_documents_and_counts(saved: Path, tmp_path: Path) -> None:
    folder = other(saved, tmp_path / "tokenizer", ENDS)
    manifest = chat(tmp_path / "out", write(tmp_path / "a.jsonl", [{"messages": messages("one", "two")}]), folder)
    (document,) = counted_of(tmp_path / "out", manifest)
    assert [token for token, _ in document].count(0) == 1
    assert document[-1] == (0, True)
    assert counted_text(saved, document) == "two" + END


# ------------------------------------------------------------ forms that people have

SPEAKS = "{% for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}" + CLOSE
THINKS = (
    "{% if tools %}" + OPEN + "tools\n{{ tools | tojson }}" + CLOSE + "{% endif %}"
    "{% set n = namespace(last=0) %}{% for message in messages %}"
    "{% if message.role == 'user' %}{% set n.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}" + OPEN + "{{ message.role }}\n{% set text = message.content or '' %}"
    "{% if loop.index0 < n.last %}{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{% if message.role == 'assistant' %}{% generation %}{{ text }}" + SPEAKS + "{% endgeneration %}"
    "{% else %}{{ text }}" + CLOSE + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}" + OPEN + "assistant\n{% endif %}"
)
"""Drops what was thought before the last question, as Qwen3's template does."""
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "nullable": None}}}
HELP = PLAIN + "You are here to look."
FIRST = "{{ message.content if message.content is string else message.content[0].text }}"
SYSTEM, TALK = {"role": "system", "content": "be brief"}, messages("one", "two", "three", "four")
ASKS = {"name": "look", "arguments": {"at": 1}}
LOOKS: list[dict[str, Any]] = [
    *messages("where?"),
    {"role": "assistant", "content": "<think>here</think>", "tool_calls": [{"type": "function", "function": ASKS}]},
    {"role": "tool", "content": "there"},
    {"role": "assistant", "content": "<think>so</think>there"},
]
THOUGHT = messages("one", "<think>1</think>two", "three", "<think>3</think>four")
THOUGHT += [*LOOKS, *messages("more", "done")]
OF_LOOKS = [
    {"from": "human", "value": "where?"},
    {"from": "function_call", "value": "<think>here</think>" + json.dumps(ASKS)},
    {"from": "observation", "value": "there"},
    {"from": "gpt", "value": "<think>so</think>there"},
]
FORMS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], Any, list[list[int]]]] = {
    "messages": ({"messages": TALK}, TALK, None, [[1, 3]]),
    "content lists": (
        {"messages": [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in TALK]},
        TALK,
        None,
        [[1, 3]],
    ),
    "sharegpt": ({"conversations": of_sharegpt(TALK)}, TALK, None, [[1, 3]]),
    "sharegpt with system and tools": (
        {"conversations": of_sharegpt(TALK), "system": "be brief", "tools": [TOOL]},
        [SYSTEM, *TALK],
        [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
        [[2, 4]],
    ),
    "sharegpt with calls": ({"conversations": OF_LOOKS}, LOOKS, None, [[1, 3]]),
    "alpaca": (
        {"instruction": "three", "input": "3", "output": "four", "history": [["one", "two"]], "system": "be brief"},
        [SYSTEM, *messages("one", "two", "three\n3", "four")],
        None,
        [[2, 4]],
    ),
    "dolly": (
        {"instruction": "one", "context": "1", "response": "two", "category": "qa"},
        messages("one\n1", "two"),
        None,
        [[1]],
    ),
    "prompt and completion": ({"prompt": "one", "completion": "two"}, messages("one", "two"), None, [[1]]),
    "tools as text": (
        {"messages": LOOKS, "tools": json.dumps([TOOL["function"]])},
        LOOKS,
        [TOOL],
        [[1, 3]],
    ),
    "legacy functions and OpenHermes' system": (
        {
            "messages": [LOOKS[0], LOOKS[1], {"role": "function", "content": "there"}, LOOKS[3]],
            "functions": [TOOL["function"]],
            "system_prompt": "be brief",
            "conversations": LOOKS,
        },
        [SYSTEM, *LOOKS],
        [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
        [[2, 4]],
    ),
    "thoughts": ({"messages": THOUGHT}, THOUGHT, None, [[1], [3], [5, 7], [9]]),
}


@pytest.mark.parametrize("form", FORMS)
def test_of_each_form_the_assistants_turns_count_as_they_are_generated(saved: Path, tmp_path: Path, form: str) -> None:
    """By the tokenizer's own template: what a turn adds to its prompt; each document is what it writes up to there."""
    record, turns, tools, parts = FORMS[form]
    plain = THINKS.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    reference = T.AutoTokenizer.from_pretrained(other(saved, tmp_path / "plain", plain))
    for name, template in (("marked", THINKS), ("plain", None)):
        folder = other(saved, tmp_path / name, template) if template else tmp_path / "plain"
        source = write(tmp_path / f"{name}.jsonl", [record, record])
        manifest = chat(tmp_path / f"out-{name}", source, folder)
        documents = counted_of(tmp_path / f"out-{name}", manifest)
        assert len(documents) == 2 * len(parts)
        lines = command.report(manifest, str(tmp_path / f"out-{name}"))
        told = f"2 conversations are {2 * len(parts)} documents: the chat template writes earlier turns anew"
        assert any(told in line for line in lines) == (len(parts) > 1)
        for part, document in zip(parts * 2, documents, strict=True):

            def written(stop: int, **settings: Any) -> str:
                text: str = reference.apply_chat_template(turns[:stop], tools=tools, tokenize=False, **settings)
                return text

            last = len(turns) if part == parts[-1] else part[-1] + 1
            ids = reference.apply_chat_template(turns[:last], tools=tools, return_dict=False)
            assert [token for token, _ in document] == [*ids, 0]
            generated = [written(turn + 1).removeprefix(written(turn, add_generation_prompt=True)) for turn in part]
            assert counted_text(saved, document) == "".join(generated)
            assert not any(OPEN in text for text in generated)


def test_columns_of_other_names_are_named_and_nothing_is_lost_in_silence(saved: Path, tmp_path: Path, capsys) -> None:
    row = {"question": "one", "about": "1", "answer": "two", "messages": None}
    (tmp_path / "a").mkdir()
    write(tmp_path / "a" / "a.parquet", [row])
    write(tmp_path / "a" / "b.jsonl", [row, {"question": "x", "answer": "two"}])
    words = ["prepare", "--chat", "--workers=0", "--source", str(tmp_path / "a"), "--tokenizer", str(saved)]
    named = "prompt=question,input=about,completion=answer"
    assert command.main([*words, "--out", str(tmp_path / "out"), "--columns", named]) == 0
    documents = counted_of(tmp_path / "out", read_manifest(f"{tmp_path}/out/manifest.json"))
    assert [counted_text(saved, document) for document in documents] == [f"two{CLOSE}"] * 3
    capsys.readouterr()
    for wrong in ("prompt=question", "prompt=a,completion", "prompt=a,completion=b,robot=c", "messages"):
        assert command.main([*words, "--out", str(tmp_path / "wrong"), "--columns", wrong]) == 2
        assert f"columns={wrong!r}: write PART=COLUMN" in capsys.readouterr().err
    assert command.main([*words, "--out", str(tmp_path / "typo"), "--columns", named.replace("about", "abuot")]) == 2
    assert "no record has 'abuot'; mend the name" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"columns='messages=a': are of conversations \(--chat\)"):
        prepared(tmp_path / "wrong", tmp_path / "a", columns="messages=a")
    drops = PLAIN.replace("message.content", "message.content.split('</think>')[-1]")
    calls = [TALK[0], {"role": "assistant", "content": "", "tool_calls": LOOKS[1]["tool_calls"]}]
    for number, (template, record, told) in enumerate(
        (
            (HELP, {"messages": TALK, "tools": [TOOL]}, "its chat template writes no tools: give one that does"),
            (HELP, {"messages": calls}, "its chat template writes no tool_calls: give one that does"),
            (drops, {"messages": THOUGHT[:4]}, r"its chat template drops what message 2 thinks \('1'\): give one"),
        )
    ):
        source = write(tmp_path / f"{number}.jsonl", [record])
        with pytest.raises(ValueError, match=told):
            chat(tmp_path / f"{number}", source, other(saved, tmp_path / f"{number}-tokenizer", template))


@pytest.mark.parametrize("takes", ["text", "either", "lists", "first"])
def test_texts_of_a_list_are_joined_unless_the_template_takes_lists(saved: Path, tmp_path: Path, takes: str) -> None:
    listed = "{% for part in message.content %}{{ part.text }}{% endfor %}"
    either = "{% if message.content is string %}{{ message.content }}{% else %}" + listed + "{% endif %}"
    writes = {"text": "{{ message.content }}", "either": either, "lists": listed, "first": FIRST}[takes]
    folder = other(saved, tmp_path / "tokenizer", PLAIN.replace("{{ message.content }}", writes))
    two = [{"type": "text", "text": text} for text in ("two", "2")]
    rows = [{"messages": [TALK[0], {"role": "assistant", "content": content}]} for content in (two, "three")]
    manifest = chat(tmp_path / "out", write(tmp_path / "a.jsonl", rows), folder)
    expected = ["two\n2" if takes in ("text", "first") else "two2", "three"]
    assert [counted_text(saved, each) for each in counted_of(tmp_path / "out", manifest)] == [
        text + CLOSE for text in expected
    ]


# ------------------------------------------------------------ shards and digests


def test_another_mask_is_another_corpus_and_no_mask_is_the_one_it_was(saved: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [{"messages": each, "text": "x"} for each in conversations()])
    first = chat(tmp_path / "one", source, saved)
    assert chat(tmp_path / "two", source, saved).digest == first.digest
    users = other(saved, tmp_path / "users", MARKED.replace("== 'assistant'", "!= 'assistant'"))
    second = chat(tmp_path / "three", source, users)
    assert tokens_of(tmp_path / "one", first.sources[0]) == tokens_of(tmp_path / "three", second.sources[0])
    assert (second.tokenizer_sha256, second.vocab_size) == (first.tokenizer_sha256, first.vocab_size)
    assert second.digest != first.digest
    with pytest.raises(ValueError, match=r"column 'counted' says which tokens count.*--data MANIFEST"):
        TokenShards(32, str(tmp_path / "one" / "shards"), vocab_size=first.vocab_size, end_of_document=0).open()
    with pytest.raises(ValueError, match="holds another preparation: chat_sha256 was"):
        chat(tmp_path / "one", source, users)
    text = prepared(tmp_path / "text", source, tokenizer=str(saved))
    plain = dataclasses.asdict(text)
    for shard in plain["sources"][0]["shards"]:
        assert shard.pop("num_counted") is None
    assert (text.num_counted, digest_of(plain)) == (None, text.digest)  # as it was written before there were masks
    table = pq.read_table(tmp_path / "text" / "shards" / text.sources[0].shards[0].name)
    assert table.column_names == ["tokens", "offset"]


def test_equal_conversations_are_dropped_and_a_stopped_preparation_goes_on(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"messages": each} for each in (*conversations(), conversations()[3])]
    rows += [{"conversations": of_sharegpt(conversations()[4])}]
    source, once = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", rows[:10])
    whole, left = PieceWorker.prepare, [2]

    def stopped(worker: PieceWorker, piece: Any) -> Any:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return whole(worker, piece)

    monkeypatch.setattr(PieceWorker, "prepare", stopped)
    with pytest.raises(KeyboardInterrupt):
        chat(tmp_path / "out", source, saved, drop_duplicates=True, piece_bytes=700)
    monkeypatch.setattr(PieceWorker, "prepare", whole)
    manifest = chat(tmp_path / "out", source, saved, drop_duplicates=True, piece_bytes=700)
    assert (manifest.num_documents, manifest.dropped.num_duplicates) == (10, 2)
    assert counted_of(tmp_path / "out", manifest) == counted_of(tmp_path / "once", chat(tmp_path / "once", once, saved))


def test_no_preparation_goes_on_under_other_rules_and_what_is_prepared_trains(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The identity of the first rules had no version."""
    source = write(tmp_path / "a.jsonl", [{"messages": each} for each in conversations()])
    tokenizer = T.AutoTokenizer.from_pretrained(saved)
    plain = [open_tokenizer(str(saved)).sha256, tokenizer.get_chat_template(), tokenizer.special_tokens_map]
    first_rules = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    manifest = chat(tmp_path / "out", source, saved)
    path = tmp_path / "out" / "preparation.json"
    record = json.loads(path.read_text())
    record["settings"] |= {"chat_sha256": first_rules}
    record["settings"].pop("chat_rules", None)
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"another preparation: chat_rules was None, is 5; chat_sha256 was .* folder"):
        chat(tmp_path / "out", source, saved)
    assert PreparedTokens.of(str(tmp_path / "out" / "manifest.json"), 2048).open().read(0).counted is not None
    assert read_manifest(str(tmp_path / "out" / "manifest.json")) == manifest


def test_the_share_of_long_conversations_is_said_by_the_preparation(saved: Path, tmp_path: Path) -> None:
    rows = [{"messages": messages(*texts(2 * (number % 30) + 2, number))} for number in range(60)]
    out = tmp_path / "out"
    manifest = chat(out, write(tmp_path / "a.jsonl", rows), saved)
    long = [part for part in counted_of(out, manifest) if len(part) > 2049]
    counted = sum(flag for part in long for _, flag in part) / (manifest.num_counted or 0)
    assert 0.1 < len(long) / 60 < 0.9
    said = f"--context 2048: {len(long) / 60:.1%} of the conversations are longer, with {counted:.1%} of the counted"
    assert f"{said} tokens; cut at turns, 0.0% have no room with their prompt" in command.report(manifest, str(out))


@pytest.mark.slow
def test_of_300_chats_each_is_whole_in_one_sequence_with_its_answers_as_targets(saved: Path, tmp_path: Path) -> None:
    rows = [{"messages": messages(*texts(2 + 2 * (number % 3), number))} for number in range(300)]
    manifest = chat(tmp_path / "out", write(tmp_path / "a.jsonl", rows), saved, piece_bytes=20_000)
    source = PreparedTokens.of(str(tmp_path / "out" / "manifest.json"), 2048).open()
    documents = [part for each in range(source.num_sequences) for part in trained(source, each)]
    documents = [part for part in documents if {token for token, _ in part} != {manifest.end_of_document}]
    answers = ["".join(m["content"] + CLOSE for m in row["messages"] if m["role"] == "assistant") for row in rows]
    assert sorted(counted_text(saved, part) for part in documents) == sorted(answers)
    assert sum(flag for part in documents for _, flag in part) == manifest.num_counted
    assert sorted(map(sorted, documents)) == sorted(map(sorted, counted_of(tmp_path / "out", manifest)))


# ------------------------------------------------------------ in training


def corpus(saved: Path, tmp_path: Path, context_tokens: int | None = None, **settings: Any) -> PreparedCorpus:
    """All conversations whole in one sequence, or a stream in sequences of so many tokens."""
    source = write(tmp_path / "a.jsonl", [{"messages": each} for each in conversations()])
    manifest = chat(tmp_path / "out", source, saved, **settings)
    uri = str(tmp_path / "out" / "manifest.json")
    packing: Any = "stream" if context_tokens else "whole"
    return PreparedTokens.of(uri, context_tokens or manifest.num_tokens - 1, packing=packing).open()


@pytest.mark.parametrize("align_tokens", [1, 16])
def test_targets_that_do_not_count_are_no_targets_on_any_slice(saved: Path, tmp_path: Path, align_tokens: int) -> None:
    """Over row groups, shards and pieces; a document's first token has nothing before it and is never a target."""
    source = corpus(saved, tmp_path, 48, align_tokens=align_tokens)
    flat = [
        each
        for document in counted_of(tmp_path / "out", read_manifest(str(tmp_path / "out/manifest.json")))
        for each in document
    ]
    assert source.num_sequences > 10
    empty = 0
    for sample_id in range(source.num_sequences):
        sample, begin = source.read(sample_id), sample_id * 48
        expected = [token if counts else IGNORE for token, counts in flat[begin + 1 : begin + 49]]
        for cp in (1, 2):
            layout, targets = make_layout("zigzag", 48, cp), np.zeros(48, dtype=np.int64)
            for rank in range(cp):
                piece = slice_sample(sample, layout, rank, sample_id=0, index_in_batch=0)
                targets[piece.positions[0].numpy()] = piece.targets[0].numpy()
                assert piece.num_targets == int((piece.targets != IGNORE).sum())
                empty += piece.num_targets == 0
            assert targets.tolist() == expected
    assert empty > 0


def test_the_loss_is_that_of_a_plain_loop_of_transformers_with_labels(saved: Path, tmp_path: Path) -> None:
    """Ours packs all conversations into one sequence; theirs takes one after the other."""
    source = corpus(saved, tmp_path)
    config = T.LlamaConfig(
        vocab_size=400, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    theirs = T.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model = ring_model(config)
    ours = model()
    ours.load_state_dict(theirs.state_dict())
    sample, layout = source.read(0), make_layout("zigzag", source.context_tokens, 1)
    step = StepConfig(context_tokens=source.context_tokens)
    piece = slice_sample(sample, layout, 0, sample_id=0, index_in_batch=0)
    attention = attention_of(TrainingTask(model, source, step, OptimConfig()), piece, layout, 0, None)  # type: ignore[arg-type]
    loss_sum, num_targets = language_model_loss(ours, batch_of(piece, attention, torch.device("cpu")))
    (loss_sum / num_targets).backward()

    tokenizer, total, number = T.AutoTokenizer.from_pretrained(saved), torch.zeros(()), 0
    for conversation in conversations():
        found = tokenizer.apply_chat_template(
            conversation, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
        )
        labels = found["input_ids"].masked_fill(~found["assistant_masks"].bool(), -100)
        counted = int((labels[0, 1:] != -100).sum())
        total = total + theirs(found["input_ids"], labels=labels, use_cache=False).loss * counted
        number += counted
    (total / number).backward()
    assert int(num_targets) == number
    torch.testing.assert_close(loss_sum / num_targets, total / number, rtol=0, atol=1e-5)
    for (name, own), reference in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own.grad, reference.grad, rtol=1e-3, atol=1e-5, msg=name)


# ------------------------------------------------------------ mistakes

GOOD = {"messages": messages("one", "two")}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no field": (
        {"text": "x"},
        "line 2 at byte .* has no 'messages' or 'conversations' or 'prompt' or 'instruction': it has text",
    ),
    "no completion": (
        {"prompt": "x", "response": "y"},
        "it has no 'completion': --columns prompt=prompt,completion=response names others",
    ),
    "answer beside": (
        {"messages": messages("a"), "response": "b"},
        "its 'messages' end without the answer that 'response' has: give --columns prompt=messages,completion=response",
    ),
    "two lists": ({**GOOD, "conversations": of_sharegpt(messages("a", "b"))}, "its 'messages' and 'conversations' dif"),
    "empty calls": (
        {"messages": [*messages("a"), {"role": "assistant", "content": None, "tool_calls": []}]},
        "message 2 has NoneType and no text in it and no calls",
    ),
    "lists in a struct": ({"conversations": {"from": ["human"]}}, "its 'conversations' is a dict and no list of mess"),
    "empty": ({"messages": []}, "it has no messages"),
    "no list": ({"messages": "x"}, "its 'messages' is a str and no list of messages: write one, or --col"),
    "no message": ({"messages": ["x"]}, "message 1 is a str"),
    "unknown role": (
        {"messages": [*messages("a", "b"), {"role": "robot", "content": "c"}]},
        "message 3 has the role 'robot': known are system, developer, user, assistant, tool",
    ),
    "unknown sender": ({"conversations": [{"from": "bing", "value": "a"}]}, "message 1 has the role 'bing'"),
    "no content": ({"messages": [{"role": "assistant"}]}, "message 1 has NoneType and no text in it"),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
        "message 1 has a part of type 'image_url': only parts of text are trained on",
    ),
    "call": ({"conversations": [{"from": "function_call", "value": "f()"}]}, "message 1's calls are no JSON: "),
    "nameless call": ({"conversations": [{"from": "function_call", "value": "{}"}]}, "message 1 has a function_call w"),
    "history": ({"instruction": "a", "output": "b", "history": ["c"]}, "its history is no list of pairs"),
    "two answers": ({"instruction": "a", "output": "b", "response": "c"}, "it has 'output' and 'response': --columns"),
    "tools of text": ({**GOOD, "tools": "look"}, "its tools are no JSON: "),
    "no assistant": ({"messages": messages("a")}, "it has no assistant turn, so that nothing counts in the loss"),
    "tools": ({**GOOD, "tools": "{}"}, "its tools are a dict and no list"),
    "weight": ({"messages": [{**GOOD["messages"][0], "weight": 0.5}]}, "message 1 has weight=0.5: 0 or false leaves"),
    "train": ({"messages": [{**GOOD["messages"][0], "train": "no"}]}, "message 1 has train='no': 0 or false leaves"),
    "none counts": (
        {"messages": [*messages("a"), {"role": "assistant", "content": "b", "loss": False}]},
        "nothing counts in the loss: its assistant turns are all marked so",
    ),
    "two systems": (
        {"system": "a", "messages": [{"role": "system", "content": "b"}, *messages("c", "d")]},
        "its system and the system message in its list differ: keep one of them",
    ),
    "system": ({**GOOD, "system": ["a"]}, "its system is a list and no text"),
}


def test_conversations_that_cannot_be_trained_on_are_bad_records_by_name(saved: Path, tmp_path: Path) -> None:
    rows = [GOOD, *(record for record, _ in BAD.values()), GOOD]
    source = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError, match=rf"a\.jsonl: {BAD['no field'][1]}"):
        chat(tmp_path / "out", source, saved)
    manifest = chat(tmp_path / "out", source, saved, on_bad_input="skip", max_bad_share=1.0)
    assert (manifest.num_documents, manifest.dropped.num_bad_records) == (2, len(BAD))
    for (_, told), bad in zip(BAD.values(), manifest.dropped.bad, strict=True):
        assert re.search(told, bad), bad


def test_a_template_that_does_not_tell_the_assistants_tokens_is_refused_with_the_way_out(
    saved: Path, tmp_path: Path
) -> None:
    folder = other(saved, tmp_path / "tokenizer", LAST_ONLY)
    twice = write(tmp_path / "twice.jsonl", [{"messages": messages("a", "b", "c", "d")}])
    with pytest.raises(ValueError, match=r"writes up to message 2 is not how it begins .*put \{% generation %\}"):
        chat(tmp_path / "out", twice, folder)
    first = write(tmp_path / "first.jsonl", [{"messages": messages("a", "b")[1:]}])
    with pytest.raises(ValueError, match="it begins with an assistant turn"):
        chat(tmp_path / "first", first, other(saved, tmp_path / "plain", PLAIN))
    assert chat(tmp_path / "marked", first, saved).num_documents == 1
    empty = write(tmp_path / "empty.jsonl", [GOOD])
    nothing = MARKED.replace(ANSWER + "{% endgeneration %}", "{% endgeneration %}" + ANSWER)
    with pytest.raises(ValueError, match="no token counts: "):
        chat(tmp_path / "empty", empty, other(saved, tmp_path / "nothing", nothing))


def test_settings_that_cannot_be_are_named(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    source, out = write(tmp_path / "a.jsonl", [GOOD, GOOD]), str(tmp_path / "out")
    given = ["prepare", "--source", str(source), "--out", out, "--chat", "--workers", "0"]
    assert command.main(given) == 2
    assert "tokenizer='bytes': bytes have no chat template: give a folder" in capsys.readouterr().err
    assert command.main([*given, "--tokenizer", str(other(saved, tmp_path / "none", None))]) == 2
    assert "has no chat template, or none that is its default: write one" in capsys.readouterr().err
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(ValueError, match=r"a\.txt: is text: give records with a conversation"):
        chat(tmp_path / "text", tmp_path / "a.txt", saved)
    assert command.main([*given, "--tokenizer", str(saved)]) == 0
    said = capsys.readouterr().out.splitlines()
    manifest = read_manifest(f"{out}/manifest.json")
    share = (manifest.num_counted or 0) / manifest.num_tokens
    assert said[2] == f"{manifest.num_counted} of the tokens count in the loss ({share:.1%})"
    PreparedTokens.of(f"{out}/manifest.json", 4, packing="stream")
    assert "context_tokens=4: 100.0% of the conversations are cut where sequences end" in caplog.text
