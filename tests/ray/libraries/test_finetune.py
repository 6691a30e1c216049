"""The page on fine-tuning, from its conversations to its chat: every command and line of code runs as it is written."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ring.cli import main as command
from elastic_ring.monitor.metrics import SUMMARY_NAME, read_metrics
from elastic_ring.runtime.driver.cluster import left_behind
from tests.small_models import small_config
from tests.unit.data.test_chat import saved

pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "finetune.md"
__all__ = ["saved"]


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [block for of, block in found if of == language]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's own
def test_the_page_leads_from_conversations_to_a_chat(local_ray, saved, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    sizes = {"vocab_size": 400, "hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
    own = {"max_position_embeddings": 2048, "tie_word_embeddings": False, "eos_token_id": 2}
    config = small_config(**sizes, **own)
    transformers.LlamaForCausalLM(config).save_pretrained("base")
    for file in saved.iterdir():
        (tmp_path / "base" / file.name).write_bytes(file.read_bytes())
    Path("chats.jsonl").write_text(200 * blocks("json")[0])
    for line in blocks("")[0].splitlines():
        assert command(shlex.split(line)[1:]) == 0, line
    assert left_behind("tuned") == []
    losses = [float.fromhex(loss) for loss in json.loads(Path("runs", "tuned", SUMMARY_NAME).read_text())["losses"]]
    assert losses[-1] < losses[0]
    validated = [line["val_loss"] for line in read_metrics(Path("runs", "tuned")) if line["val_loss"] is not None]
    assert validated == sorted(validated, reverse=True)
    assert len(validated) == 4
    names: dict[str, Any] = {}
    exec(blocks("python")[0], names)
    assert "What is a ring?" in capsys.readouterr().out
    merged = transformers.AutoModelForCausalLM.from_pretrained("merged").eval()
    with torch.no_grad():
        for tokens in (names["tokens"], {"input_ids": torch.randint(0, 400, (1, 30))}):
            torch.testing.assert_close(merged(**tokens).logits, names["model"](**tokens).logits, rtol=0, atol=1e-5)
