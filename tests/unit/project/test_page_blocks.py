"""Each block of Python on a page runs, or is quoted from a file that runs: a reader copies it."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import elastic_ring
from elastic_ring.attention.patterns import families
from tests.unit.data.corpora import texts, write_jsonl
from tests.unit.project.test_docs import DOCS, README, ROOT, TEXTS

BLOCK = re.compile(r"(?:^<!-- (examples/\w+\.py) -->\n)?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ON_RAY = {"guides/control.md", "guides/finetune.md"}
"""`tests/ray/libraries` runs these pages whole."""


def preparation() -> dict[str, Any]:
    write_jsonl(Path("corpus/a.jsonl"), texts(3))
    vocabulary = {character: token for token, character in enumerate(sorted({"<eos>", *"".join(texts(3))}))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained("my-tokenizer")
    return {"dataset": Dataset.from_dict({"body": texts(3)}), "context_tokens": 64}


def one_rank() -> dict[str, Any]:
    q, k, v = (torch.randn(1, 4096, heads, 32) for heads in (2, 1, 1))
    return {"q": q, "k": k, "v": v, "group": dist.group.WORLD, "ring_attention": elastic_ring.ring_attention}


NAMES: dict[str, Callable[[], dict[str, Any]]] = {
    "data.md": preparation,
    "patterns.md": one_rank,
    "attention.md": lambda: dict(vars(families)),
    "quickstart.md": dict,
}
"""By page: the names that its sentences give to the blocks."""


def blocks(page: str) -> list[tuple[str, str]]:
    return BLOCK.findall(TEXTS[DOCS / page])


def test_every_page_with_python_is_run():
    pages = {
        page.relative_to(DOCS).as_posix() for page, text in TEXTS.items() if DOCS in page.parents and BLOCK.search(text)
    }
    assert pages == NAMES.keys() | ON_RAY
    assert not re.search(r"^``` *\{|--8<--", "".join(TEXTS.values()), re.MULTILINE), "no block hides from this test"


@pytest.mark.parametrize("page", NAMES)
def test_python_on_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        names = {**NAMES[page](), "__name__": "__main__"}
        for example, source in blocks(page):
            if not example:
                exec(compile(source, page, "exec"), names)
    finally:
        dist.destroy_process_group()
    if page == "data.md":
        assert names["manifest"].num_documents == 3


def test_examples_on_pages_are_the_files():
    """`python docs/tables.py` writes them. `test_docs` and `tests/ray/libraries` run the files."""
    with_examples = runpy.run_path(str(DOCS / "tables.py"))["with_examples"]
    text = TEXTS[DOCS / "quickstart.md"]
    assert [example for example, _ in blocks("quickstart.md") if example] == [
        "examples/own_model.py",
        "examples/ring_attention_alone.py",
    ]
    assert text == with_examples(text)


def test_python_in_the_readme_is_quoted_from_the_examples():
    """`...` on a line of its own stands for lines left out."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")]
    quotations = [source for _, source in BLOCK.findall(README)]
    assert quotations
    for quotation in quotations:
        pieces = [piece for piece in re.split(r"^ *\.\.\.\n", quotation, flags=re.MULTILINE) if piece]
        assert any(all(piece in source for piece in pieces) for source in sources), quotation
