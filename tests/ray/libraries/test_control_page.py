"""The page on control: each of its commands runs as it is written, on a small mesh."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from elastic_ring.cli import main as command
from elastic_ring.monitor.json_files import read_json
from elastic_ring.monitor.metrics import SUMMARY_NAME, read_metrics
from elastic_ring.runtime.driver.cluster import left_behind

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "control.md"
SMALL = "--dp 1 --cp 1 --spares 0 --context 128 --global-batch 64 --step.sequences-per-pass 16 --model.num-layers 1"


@pytest.mark.slow
def test_the_commands_of_the_page_validate_keep_and_go_on(
    local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "module.py").write_text("def one() -> int:\n    return 1\n\n\n" * 60)
    blocks = re.findall(r"^```\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for line in "".join(blocks).splitlines():
        words = shlex.split(line)[1:]
        small = shlex.split(SMALL) if words[0] == "train" else []
        assert command([*words, *small]) == 0, line
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
