"""A thousand changed files: each is read or refused in the project's own words, in two seconds and a gigabyte, and
nothing is written outside. See `mutated_files`; `test_strangers_files` has what each reader must refuse."""

from __future__ import annotations

import json
import selectors
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.state.mutated_files import KINDS, LIGHT, Case, run_case, write_artefacts

ROOT = Path(__file__).parents[3]
NUM_CASES, NUM_FEW, NUM_PARTS = 1000, 25, 4
MOST_S, MOST_BYTES = 2.0, 1 << 30
HANGS_AFTER_S = 60.0
"""Of a process that shares its cores."""


def wrong_with(case: Case) -> list[str]:
    slow = [f"{case.seconds:.1f} s"] * (case.seconds > MOST_S)
    return [f"{case.what}: {problem}" for problem in (*case.problems, *slow, *_large(case))]


def _large(case: Case) -> list[str]:
    return [f"{case.grown_bytes >> 20} MiB"] * (case.grown_bytes > MOST_BYTES)


def test_a_few_changed_files_are_read_or_refused(tmp_path: Path) -> None:
    write_artefacts(tmp_path, LIGHT)
    for number in range(-len(KINDS), 0):
        if KINDS[number].name in LIGHT:
            assert not run_case(tmp_path, number).problems  # as it was written
    assert not [line for number in range(NUM_FEW) for line in wrong_with(run_case(tmp_path, number, LIGHT))]


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, *(pytest.param(part, marks=pytest.mark.soak) for part in range(1, NUM_PARTS))])
def test_a_thousand_changed_files_are_read_or_refused(tmp_path: Path, first: int) -> None:
    for package in ("transformers", "datasets"):
        pytest.importorskip(package)
    write_artefacts(tmp_path)
    cases = list(_cases(tmp_path, range(first, NUM_CASES, NUM_PARTS)))
    assert len(cases) == NUM_CASES // NUM_PARTS
    for worst in (max(cases, key=lambda case: case.seconds), max(cases, key=lambda case: case.grown_bytes)):
        print(f"worst: {worst.seconds:.2f} s, {worst.grown_bytes >> 20} MiB, {worst.what}")
    assert not [line for case in cases for line in wrong_with(case)]


def _cases(root: Path, numbers: range) -> Iterator[Case]:
    """Each in a process that has read others; one that dies or hangs is a problem, and another goes on."""
    worker: subprocess.Popen[bytes] | None = None
    for number in numbers:
        if worker is None:
            shutil.rmtree(root / "cases", ignore_errors=True)
            words = [sys.executable, "-m", "tests.unit.state.mutated_files", str(root)]
            pipe = subprocess.PIPE
            worker = subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0)
            assert _line(worker, 5 * HANGS_AFTER_S) == "ready\n"
        assert worker.stdin is not None
        worker.stdin.write(b"%d\n" % number)
        what, result = _line(worker, HANGS_AFTER_S), _line(worker, HANGS_AFTER_S)
        if result:
            yield Case(*json.loads(result))
            continue
        ended = worker.poll()
        worker.kill()
        _, told = worker.communicate()
        yield Case(f"{number} {what}", [f"hangs, or its process ends with {ended}: {told[-2000:].decode()}"], 0.0, 0)
        worker = None
    if worker is not None:
        worker.kill()
        worker.communicate()


def _line(worker: subprocess.Popen[bytes], limit_s: float) -> str:
    """The next line of its output; empty if there comes none."""
    assert worker.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(worker.stdout, selectors.EVENT_READ)
        return worker.stdout.readline().decode() if selector.select(limit_s) else ""
