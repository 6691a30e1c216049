"""What the job script tells whoever called it: one exit status for each way to end, and a name that stays the same."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elastic_ring.data.source import StdlibText
from elastic_ring.errors import ShardLost
from elastic_ring.monitor.metrics import CONFIG_NAME
from elastic_ring.runtime import bits
from elastic_ring.trainer import described
from jobs import train_1t


class Ends:
    """A trainer whose run ends at once."""

    def __init__(self, how: BaseException) -> None:
        self.how = how

    def fit(self) -> Any:
        raise self.how


@pytest.mark.parametrize(
    ("how", "status", "told"),
    [
        (ShardLost("no holder of cp_rank 1"), 1, "ShardLost: no holder of cp_rank 1"),
        (ValueError("dp=0: must be 1 or more"), 2, "dp=0: must be 1 or more"),
        (KeyboardInterrupt(), 130, "stopped before training began"),
        (KeyboardInterrupt("stopped; nothing is left running"), 130, "stopped; nothing is left running"),
    ],
)
def test_each_end_has_its_exit_status(
    how: BaseException, status: int, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_1t, "build", lambda arguments: Ends(how))
    assert train_1t.main([]) == status
    assert capsys.readouterr().err.strip() == f"train_1t: {told}"


class Corpus:
    """A user's own source without a `repr`."""


def test_a_users_object_has_the_same_name_in_every_process() -> None:
    parts = "Corpus(), partial(sorted, Corpus(), key=Corpus), StdlibText(8), 'text', None"
    here = [described(part) for part in (Corpus(), partial(sorted, Corpus(), key=Corpus), StdlibText(8), "text", None)]
    program = (
        "from functools import partial\nfrom elastic_ring.data.source import StdlibText\n"
        "from elastic_ring.trainer import described\nfrom tests.unit.test_train_job import Corpus\n"
        f"print([described(part) for part in ({parts})])"
    )
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert there.stdout.strip() == str(here)
    assert not any("0x" in name for name in here)
    assert len(set(here)) == len(here)


def test_a_runs_record_names_its_versions_which_are_no_part_of_what_it_is_recognised_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = train_1t.build(train_1t.parse(["--run-dir", str(tmp_path)]))
    before = trainer._digest
    monkeypatch.setattr(bits.torch, "__version__", "0.1")
    trainer._write_config()
    recorded = json.loads((tmp_path / CONFIG_NAME).read_text())
    assert recorded["versions"] == bits.versions("cpu")
    assert recorded["versions"]["torch"] == "0.1"
    assert recorded["digest"] == trainer._digest == before
    monkeypatch.undo()
    assert trainer._finished() is None, "the same run, whatever it was begun with"
