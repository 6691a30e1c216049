"""What the pages say of commands, settings, errors and code is what is there."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from elastic_ring import errors
from elastic_ring.attention import spec
from elastic_ring.attention.spec import parse_pattern
from elastic_ring.config import Timeouts
from elastic_ring.faults import KINDS, PHASES, ROLES, parse_faults
from elastic_ring.monitor.metrics import JOURNAL_NAME, METRICS_NAME, STATUS_NAME, SUMMARY_NAME
from elastic_ring.runtime.cluster import WORKER_ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")
OPERATING = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
QUIET = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}

SCRIPT = re.compile(r"python ((?:jobs|examples)/\S+\.py)\b([^`\n|;&]*(?:'[^'\n]*')?[^`\n|]*)")
MAKE = re.compile(r"^make ([a-z-]+)|`make ([a-z-]+)[^`]*`", re.MULTILINE)

MAKE_ARGUMENTS = re.compile(r"make train ARGS='([^']*)'")


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its title row."""
    part = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def script_calls() -> Iterator[tuple[str, str, list[str]]]:
    """(page, script, its words) of every command that a page names."""
    for page in PAGES:
        for script, rest in SCRIPT.findall(page.read_text(encoding="utf-8")):
            yield page.name, script, shlex.split(rest, comments=True)
        for arguments in MAKE_ARGUMENTS.findall(page.read_text(encoding="utf-8")):
            yield page.name, "jobs/train_1t.py", shlex.split(arguments)


CALLS = sorted({
    (script, word.split("=")[0]) for _, script, words in script_calls() for word in words if word[:2] == "--"
})  # fmt: skip


@cache
def help_of(script: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / script), "--help"], env={**QUIET, "PYTHONPATH": str(ROOT)}, cwd=ROOT,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_there_are_commands_to_check() -> None:
    assert {script for script, _ in CALLS} >= {"jobs/train_1t.py", "jobs/status.py"}
    assert {"--faults", "--run-dir", "--spares"} <= {option for _, option in CALLS}


def test_every_script_that_a_page_names_is_there() -> None:
    named = {script for _, script, _ in script_calls()} | set(re.findall(r"\b(?:jobs|examples)/\w+\.py", README))
    assert [script for script in sorted(named) if not (ROOT / script).is_file()] == []


@pytest.mark.parametrize(("script", "option"), CALLS)
def test_every_option_that_a_page_gives_to_a_script_is_known_to_it(script: str, option: str) -> None:
    assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", help_of(script)), f"{script} has no {option}"


def test_every_make_target_and_test_file_that_a_page_names_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    targets = {one or other for one, other in MAKE.findall(text)}
    assert {"train", "test"} <= targets
    assert [target for target in sorted(targets) if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []
    files = set(re.findall(r"\btests/[\w/]+\.py", text))
    assert files
    assert [file for file in sorted(files) if not (ROOT / file).is_file()] == []


def test_the_families_of_patterns_are_those_of_the_table() -> None:
    listed = rows(README, "Sparse attention")
    assert sorted(family.strip("`") for family, _, _ in listed) == sorted((*spec._FAMILIES, *spec._LISTED))
    for family, example, _ in listed:
        assert example.startswith(family[:-1])
        parse_pattern(example.strip("`"))


def test_every_link_between_the_pages_leads_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            file, _, anchor = target.partition("#")
            there = page if not file else page.parent / file
            if not there.is_file() or (anchor and anchor not in anchors(there)):
                broken.append(f"{page.name}: {target}")
    assert broken == []


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("file", ["examples/own_model.py", "examples/ring_attention_alone.py"])
def test_the_readme_shows_the_example_as_it_is(file: str) -> None:
    assert (ROOT / file).read_text(encoding="utf-8") in code_blocks(README, "python")


def test_the_readme_shows_no_other_python() -> None:
    assert len(code_blocks(README, "python")) == 2


def test_ring_attention_alone_runs_on_two_ranks_and_agrees_with_one_process() -> None:
    """The example compares itself with torch's own attention and fails where they differ."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "ring_attention_alone.py")], env={**QUIET, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    # Two processes write to one pipe, and without buffering the ends of lines come apart from the lines.
    said = re.findall(r"rank (\d) of 2: (\w+) \(", done.stdout)
    assert sorted(said) == sorted((rank, name) for rank in "01" for name in ("out", "dk", "dv"))


def test_own_model_trains_through_the_loss_of_its_worker(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "own_model.py"), "--steps", "3", "--run-dir", str(folder)],
        # A Ray of its own, not whatever else runs on this machine, that shares its cores with the tests beside it.
        env={**QUIET, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local", "RAY_worker_niceness": "0"},
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((folder / SUMMARY_NAME).read_text(encoding="utf-8"))
    assert summary["steps"] == 3
    assert summary["exact"]
    assert [recovery["action"] for recovery in summary["recoveries"]] == ["spare took its place"]
    assert (folder / "weights.safetensors").stat().st_size > 0


def test_the_table_of_timeouts_is_that_of_the_code() -> None:
    """Fields, order and defaults."""
    told = [(cells[0].strip("`"), float(cells[1])) for cells in rows(OPERATING, "Timeouts")]
    assert told == [(field.name, field.default) for field in dataclasses.fields(Timeouts)]


def test_every_variable_that_workers_get_is_named_with_its_value_and_why() -> None:
    table = OPERATING.split("\n### Variables of workers on GPUs\n", 1)[1].split("\n## ", 1)[0]
    told = {name.strip("`"): (value, why) for name, value, why in cells_of(table)}
    assert {name: value for name, (value, _) in told.items()} == WORKER_ENVIRONMENT
    assert all(why for _, why in told.values())


def test_every_kind_of_error_is_explained_once() -> None:
    told = [cells[0].strip("`") for cells in rows(OPERATING, "Errors")]
    kinds = {
        name for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.ElasticRingError) and kind is not errors.ElasticRingError
    }  # fmt: skip
    assert len(told) == len(set(told))
    assert set(told) == kinds


def test_the_grammar_of_faults_is_that_of_the_code() -> None:
    table = README.split("### Planned faults", 1)[1].split("\n## ", 1)[0]
    told = {cells[0]: set(re.findall(r"`([\w-]+)`", cells[1])) for cells in cells_of(table)}
    assert told["kind"] == set(KINDS)
    assert told["phase"] == set(PHASES)
    assert told["role"] - {"heal"} == set(ROLES)
    schedules = re.findall(r"--faults '([^']+)'", README)
    assert schedules
    for schedule in schedules:
        assert parse_faults(schedule)


def cells_of(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"][2:]


def test_the_files_of_a_run_have_the_names_that_the_readme_gives() -> None:
    others = ("config.json", "loss.png", "weights.safetensors")
    for name in (JOURNAL_NAME, METRICS_NAME, STATUS_NAME, SUMMARY_NAME, *others):
        assert f"| `{name}` |" in README
