"""Each system of the checkpoint bench saves the whole state, and the table has its figures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.checkpoint.bench_checkpoint import Bench, measure, report, shard_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench(shard_of(6 << 20))
    yield made
    made.stager.close()


def test_each_system_writes_every_byte_of_the_state(bench: Bench, tmp_path: Path) -> None:
    assert 0.9 * (6 << 20) < bench.num_bytes <= (6 << 20) + 64  # and the steps of the optimizer
    for name, save in bench.systems.items():
        (folder := tmp_path / name).mkdir()
        waits, ends = save(folder)
        written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        assert bench.num_bytes <= written < 1.05 * bench.num_bytes, name
        assert 0 < waits <= ends


def test_the_table_has_ratios_to_the_plain_write_of_the_same_round(bench: Bench, tmp_path: Path) -> None:
    assert list(measure(bench, 1, tmp_path)) == list(bench.systems)
    found = {"plain write": [(9.0, 9.0), (1.0, 1.0), (2.0, 2.0)], "ours": [(5.0, 9.0), (0.5, 3.0), (0.7, 4.0)]}
    text, figures = report(found, 2_000_000_000, tmp_path)
    expected = {"first_wait_s": 5.0, "waits_s": 0.6, "ends_s": 3.5, "gb_per_s": 2 / 3.5, "ratio_to_plain": 2.5}
    assert figures["ours"] == pytest.approx(expected)
    assert "2.500" in text
    assert list(tmp_path.iterdir()) == []
