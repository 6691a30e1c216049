"""The pages on control and on object stores: each of their commands runs as it is written, on a small mesh."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from elastic_ring.cli import main as command
from elastic_ring.monitor.json_files import read_json
from elastic_ring.monitor.metrics import SUMMARY_NAME, read_metrics
from elastic_ring.runtime.driver.cluster import left_behind
from elastic_ring.state.storage.folder import Storage
from tests.ray.conftest import tiny_trainer

DOCS = Path(__file__).parents[3] / "docs"
SMALL = "--dp 1 --cp 1 --spares 0 --context 128 --global-batch 64 --step.sequences-per-pass 16 --model.num-layers 1"


def commands(page: str) -> Iterator[list[str]]:
    blocks = re.findall(r"^```\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for line in "".join(blocks).splitlines():
        words = shlex.split(line)[1:]
        yield [*words, *(shlex.split(SMALL) if words[0] == "train" else [])]


@pytest.mark.slow
def test_the_commands_of_the_page_validate_keep_and_go_on(local_ray, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "module.py").write_text("def one() -> int:\n    return 1\n\n\n" * 60)
    page = (DOCS / "guides" / "control.md").read_text(encoding="utf-8")
    for words in commands(page):
        assert command(words) == 0, words
    told = capsys.readouterr().out
    assert "code_perplexity" in told
    assert "learning rate" in told
    assert left_behind("sets") == []
    run = tmp_path / "runs" / "sets"
    summary = read_json(run / SUMMARY_NAME) or {}
    assert (summary["steps"], summary["planned_steps"]) == (50, 50)
    assert summary["resumed_from"][0]["step"] <= 40
    validated = [line["step"] for line in read_metrics(run) if line.get("val_held_loss") is not None]
    assert validated == [7, 15, 23, 31, 39]
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    made: dict[str, Any] = {}
    exec(example, made)
    enough = tiny_trainer(tmp_path, "enough", callbacks=(made["Enough"](),), dp=1, cp=1, spares=0, val_every_steps=2)
    assert enough.fit().summary["steps"] == 2


@pytest.mark.slow
def test_the_commands_of_the_page_on_storage_need_a_bucket_and_make_the_keys(
    fork_server, object_store, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    ray.shutdown()  # hosts take the keys from the environment in which Ray starts
    object_store.enter(monkeypatch, RAY_ADDRESS="local")
    page = (DOCS / "operating" / "storage.md").read_text(encoding="utf-8").split("## S3")[1].split("\n## ")[0]
    shutil.copytree(Path(shlex.__file__).parent / "json", tmp_path / "corpus")
    bucket = object_store.new_bucket()
    with fork_server.forking():
        for words in commands(page.replace("s3://bucket/", f"s3://{bucket}/")):
            assert command(words) == 0, words
    assert "20" in capsys.readouterr().out
    made = {name.split("/")[0] for name, _ in Storage(f"s3://{bucket}/").names()}
    assert made == {"prepared", "runs", "weights"}
    for name in ("data", "train"):
        for words in commands(page.replace("s3://bucket/", "s3://no-such-bucket/")):
            if words[0] == name:
                assert command(words) == 2, words
