"""What the pages say of commands, settings, errors, log lines and code is what is there."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

import pytest

import elastic_ring
from elastic_ring import cli, errors
from elastic_ring.attention.patterns import parse
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.cli import main, settings
from elastic_ring.config import Timeouts
from elastic_ring.faults import KINDS, PHASES, ROLES, parse_faults
from elastic_ring.model.config import ModelConfig
from elastic_ring.monitor.metrics import JOURNAL_NAME, METRICS_NAME, STATUS_NAME, SUMMARY_NAME
from elastic_ring.runtime.driver.cluster import WORKER_ENVIRONMENT
from elastic_ring.train import guard_table
from tests.conftest import covering, pairs

ROOT = Path(__file__).resolve().parents[3]
DOCS, OPERATING = ROOT / "docs", ROOT / "docs" / "operating"
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "deploy/README.md")),
        *DOCS.rglob("*.md"),
        *(ROOT / "benchmarks" / "results").glob("*.md"),
    ]
)
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
README, MEND, WATCH = TEXTS[ROOT / "README.md"], TEXTS[OPERATING / "mend.md"], TEXTS[OPERATING / "watch.md"]
ALL = "\n".join(TEXTS.values())
TABLES: dict[tuple[str, str], str] = runpy.run_path(str(DOCS / "tables.py"))["tables"]()
QUIET = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}

MOST_WORDS = 20_000
"""Lower it when pages lose words; a page that needs more takes them from another."""

COMMANDS = {
    "train": "elastic_ring.cli.train",
    "status": "elastic_ring.cli.status",
    "plan": "elastic_ring.cli.train:main_plan",
    "calibrate": "elastic_ring.cli.operate:calibrate",
    "data": "elastic_ring.cli.data",
    "tune": "elastic_ring.cli.tune",
    "export": "elastic_ring.cli.checkpoints:export_weights",
    "metrics": "elastic_ring.cli.operate:metrics",
    "drain": "elastic_ring.cli.operate:drain",
    "checkpoints": "elastic_ring.cli.checkpoints",
    "zero3": "elastic_ring.cli.zero3",
    "scale": "elastic_ring.cli.operate:scale",
    "drills": "deploy.drills.__main__",
    "doctor": "elastic_ring.cli.operate:doctor",
    "forecast": "elastic_ring.cli.forecasts.command",
}
VERBS = {"data": ["prepare"], "checkpoints": ["list", "verify", "prune", "export"]}
DOORS = {
    "train_1t": "train",
    "train_zero3": "zero3",
    "status": "status",
    "calibrate": "calibrate",
    "plan": "plan",
    "search_patterns": "tune",
}
CONSOLE = re.compile(r"(?:elastic-ring|-m deploy\.(?=drills)) ?([a-z]+)\b(.*)")
SCRIPT = re.compile(r"python ((?:-m )?(?:jobs|tune|examples|benchmarks)[/.]\S+)(.*)")
MAKE = re.compile(r"^make ([a-z-]+)|`make ([a-z-]+)[^`]*`", re.MULTILINE)
MAKE_ARGUMENTS = re.compile(r"make train ARGS='([^']*)'")
TOP = r"(?:elastic_ring|benchmarks|tests|docs|examples|jobs|tune|deploy)"


def options(words: str) -> set[str]:
    return {word.split("=")[0] for word in shlex.split(words, comments=True) if word[:2] == "--"}


def snippets() -> Iterator[str]:
    """Each line of code on the pages, and each code span in their sentences as one line."""
    for text in TEXTS.values():
        for fence in re.findall(r"^```.*?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            yield from fence.splitlines()
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        yield from (line for line in prose.splitlines() if line.startswith("    "))
        yield from (span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", prose))


def console_calls() -> Iterator[tuple[str, str]]:
    """(subcommand, option or nothing) of every `elastic-ring`, `jobs/` and `tune/` command that a page names."""
    for line in snippets():
        for command, rest in CONSOLE.findall(line):
            own, _, of_the_run = rest.partition(" -- ")
            yield from ((command, option) for option in options(own) | {""})
            yield from (("train", option) for option in options(of_the_run))
        for script, rest in SCRIPT.findall(line):
            if script.startswith(("jobs/", "tune/")):
                yield from ((DOORS[Path(script).stem], option) for option in options(rest) | {""})
        for arguments in MAKE_ARGUMENTS.findall(line):
            yield from (("train", option) for option in options(arguments))


def bench_calls() -> Iterator[tuple[Path, str]]:
    """(script, option) of every command in `benchmarks` or `examples` that a page names."""
    for line in snippets():
        for script, rest in SCRIPT.findall(line):
            if script.startswith("-m "):
                script = script[3:].replace(".", "/") + ".py"
            if script.startswith(("benchmarks/", "examples/")):
                yield from ((ROOT / script, option) for option in options(rest) | {""})


@cache
def help_of(command: str) -> str:
    """What `elastic-ring COMMAND --help` prints, or its verbs' `--help`, in this process."""
    printed = io.StringIO()
    for verb in VERBS.get(command, [""]):
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(printed),
            contextlib.suppress(SystemExit),
        ):
            patch.setattr(os, "environ", os.environ.copy())
            module, _, function = COMMANDS[command].partition(":")
            words = "--help-all" if "cli.train" in module else "--help"
            print(words)
            getattr(importlib.import_module(module), function or "main")([*verb.split(), words])
    assert "usage" in printed.getvalue().lower(), command
    return printed.getvalue()


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its title row."""
    return cells_of(re.split(r"\n#+ ", text.split(f" {heading}\n", 1)[1])[0])


def cells_of(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"][2:]


def test_the_readme_has_at_most_200_lines():
    assert len(README.splitlines()) <= 200


def test_a_change_replaces_words_of_the_pages_and_adds_none():
    """Dated results, and tables and examples that a command prints, do not count."""
    pages = {page: text.split() for page, text in TEXTS.items() if page.parent.name != "results"}
    printed = TEXTS[DOCS / "metrics.md"].split("## The table", 1)[1].split() + guard_table.table().split()
    printed += " ".join(TABLES.values()).split()
    printed += [word for block in re.findall(r"^<!-- examples/.*?^```$", ALL, re.M | re.S) for word in block.split()]
    assert sum(map(len, pages.values())) - len(printed) <= MOST_WORDS
    assert len(pages[DOCS / "benchmarks.md"]) <= 1200, "figures have their place in benchmarks/results"


def test_the_changelog_has_one_line_a_change():
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) > 100
    assert [line for line in lines[3:] if (line and line[:2] not in ("- ", "##")) or len(line) > 120] == []


def test_the_quickstart_has_every_command():
    text = TEXTS[DOCS / "quickstart.md"]
    table = cells_of(text[text.index("| command |") :].split("\n\n")[0])
    assert {row[0].strip("`").split()[1] for row in table} == set(cli.COMMANDS)


def test_every_option_that_a_page_gives_to_a_command_is_known_to_it():
    calls = set(console_calls())
    assert {("train", "--faults"), ("train", "--run-dir"), ("train", "--plan"), ("status", "--watch")} <= calls
    unknown = [
        f"{command} {option}"
        for command, option in sorted(calls)
        if option and not re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", help_of(command))
    ]
    assert unknown == []


def test_every_option_that_a_page_gives_to_a_benchmark_is_in_its_source():
    harness = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks" / "harness").glob("*.py"))
    calls = set(bench_calls())
    assert len({script for script, _ in calls}) > 10
    unknown = [
        f"{script.relative_to(ROOT)} {option}"
        for script, option in sorted(calls)
        if f'"{option}"' not in script.read_text(encoding="utf-8") + harness + '""'
    ]
    assert unknown == []


def test_every_file_that_a_page_names_is_there():
    named = set(re.findall(rf"(?<![\w./-]){TOP}/[\w./-]*\w", ALL))
    assert len(named) > 60
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_four_questions_lead_to_code_that_is_there():
    architecture = TEXTS[DOCS / "architecture.md"]
    assert "(docs/architecture.md)" in README
    answers = rows(TEXTS[ROOT / "CONTRIBUTING.md"], "Four questions")
    assert len(answers) == 4
    for question, file, place in answers:
        assert re.search(rf"^\| {re.escape(question)} \|[^|]*{re.escape(file)}", architecture, re.MULTILINE), question
        sources = [ROOT / name.strip("`") for name in (file, *re.findall(r"`elastic_ring/[^`]+`", place))]
        defined = "".join(source.read_text(encoding="utf-8") for source in sources)
        for name in re.findall(r"`(\w+)`", place):
            assert re.search(rf"^ *(?:def {name}|class {name}|{name}:)", defined, re.MULTILINE), name


def test_every_make_target_that_a_page_names_is_there():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {one or other for one, other in MAKE.findall(ALL)}
    assert {"train", "test", "docs"} <= targets
    assert [target for target in sorted(targets) if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


def test_every_setting_that_a_page_names_is_there():
    classes = {name: getattr(elastic_ring, name) for name in elastic_ring.__all__} | {"ModelConfig": ModelConfig}
    named = re.findall(r"`(\w+)[.(](\w+)[=`()]", ALL)
    checked = [(kind, setting) for kind, setting in named if inspect.isclass(classes.get(kind))]
    assert len(checked) > 5
    unknown = [
        f"{kind}.{setting}"
        for kind, setting in checked
        if setting not in inspect.signature(classes[kind]).parameters and not hasattr(classes[kind], setting)
    ]
    assert unknown == []


def test_every_link_leads_somewhere():
    broken = []
    for page, text in TEXTS.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith("https://"):
                continue  # nobody is asked for it in a test
            file, _, anchor = target.partition("#")
            there = page if not file else page.parent / file
            if not there.is_file() or (anchor and anchor not in anchors(there)):
                broken.append(f"{page.name}: {target}")
    assert broken == []


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_page_is_in_the_site():
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r": ([\w/]+\.md)$", site, re.MULTILINE))
    assert {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} - {"testing.md"} == named - {"testing.md"}


def test_every_object_of_the_api_page_is_there():
    named = re.findall(r"^::: ([\w.]+)$", TEXTS[DOCS / "api.md"], re.MULTILINE)
    assert {f"elastic_ring.{name}" for name in elastic_ring.__all__ if name != "ElasticRingTrainer"} <= set(named)
    for name in named:
        module, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(module), last) or importlib.import_module(name), name
    for name, members in re.findall(
        r"^::: ([\w.]+)\n    options:\n      members: \[(.*)\]", TEXTS[DOCS / "api.md"], re.M
    ):
        module, _, last = name.rpartition(".")
        holder = getattr(importlib.import_module(module), last, None) or importlib.import_module(name)
        assert [member for member in members.split(", ") if not hasattr(holder, member)] == []


def test_the_drawings_are_what_the_script_draws():
    drawn = runpy.run_path(str(DOCS / "images" / "draw.py"))["drawings"]()
    for name, drawing in drawn.items():
        assert (DOCS / "images" / name).read_text(encoding="utf-8") == drawing, f"run docs/images/draw.py: {name}"


def test_the_tables_of_the_code_are_what_the_script_writes():
    for (page, column), table in TABLES.items():
        assert table in TEXTS[DOCS / page], f"run docs/tables.py: {column}"


def test_the_families_of_patterns_are_those_of_the_code():
    listed = rows(TEXTS[DOCS / "patterns.md"], "Families")
    assert sorted(family.strip("`") for family, _, _ in listed) == sorted((*parse._FAMILIES, *parse._LISTED))
    for family, example, _ in listed:
        assert example.startswith(family[:-1])
        parse_pattern(example.strip("`"))


def test_the_table_of_timeouts_is_that_of_the_code():
    """Fields, order and defaults."""
    told = [(cells[0].strip("`"), float(cells[1])) for cells in rows(MEND, "Timeouts")]
    assert told == [(field.name, field.default) for field in dataclasses.fields(Timeouts)]


def test_the_table_of_metrics_is_what_the_command_prints(capsys):
    assert main(["metrics", "--table"]) == 0
    assert TEXTS[DOCS / "metrics.md"].endswith(f"\n\n{capsys.readouterr().out}")


def test_every_variable_that_workers_get_is_named_with_its_value_and_why():
    table = rows(TEXTS[OPERATING / "gpus.md"], "Variables of workers on GPUs")
    told = {name.strip("`"): (value, why) for name, value, why in table}
    assert {name: value for name, (value, _) in told.items()} == WORKER_ENVIRONMENT
    assert all(why for _, why in told.values())


def test_every_kind_of_error_is_explained_once():
    told = [cells[0].strip("`") for cells in rows(MEND, "Errors")]
    kinds = {
        name
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.ElasticRingError) and kind is not errors.ElasticRingError
    }
    assert len(told) == len(set(told))
    assert set(told) == kinds


def test_the_grammar_of_faults_is_that_of_the_code():
    told = {
        cells[0]: set(re.findall(r"`([\w-]+)`", cells[1]))
        for cells in rows(TEXTS[DOCS / "guarantees.md"], "Planned faults")
    }
    assert told["kind"] == set(KINDS)
    assert told["phase"] == set(PHASES)
    assert told["role"] - {"heal"} == set(ROLES)
    schedules = re.findall(r"--faults '([^']+)'", ALL)
    assert schedules
    for schedule in schedules:
        assert parse_faults(schedule)


def test_the_files_of_a_run_have_the_names_that_the_quickstart_gives():
    others = ("config.json", "loss.png", "weights.safetensors")
    for name in (JOURNAL_NAME, METRICS_NAME, STATUS_NAME, SUMMARY_NAME, *others):
        assert f"| `{name}` |" in TEXTS[DOCS / "quickstart.md"]


def test_the_settings_file_of_the_quickstart_is_one(tmp_path):
    (file,) = re.findall(r"^```toml\n(.*?)^```$", TEXTS[DOCS / "quickstart.md"], re.MULTILINE | re.DOTALL)
    (tmp_path / "run.toml").write_text(file, encoding="utf-8")
    asked = settings.parse(["--config", str(tmp_path / "run.toml"), "--dp", "3", "--run.timeouts.start-s", "300"])
    assert (asked.scaling.dp, asked.scaling.spares, asked.step.context_tokens) == (3, 2, 4096)
    assert (asked.run.name, asked.run.timeouts.start_s) == ("longer", 300.0)


@cache
def messages() -> str:
    """Every text in the package's code, with GAP where an expression or a `%s` stands."""
    found = []
    for path in (ROOT / "elastic_ring").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else GAP for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[.\d]*[sdrf]", GAP, node.value))
    return "\n".join(found)


GAP = "\x00"
PLACEHOLDER = r"…|\(\w+\)|\(T, G\)|\b(?:[A-Z][A-Z_]*|Event|Command|Build|reason|\d+)\b"


@pytest.mark.parametrize("heading", ["Coordinator", "Node agent", "Worker"])
def test_log_lines_that_the_runbook_explains_are_in_the_code(heading):
    """Of each line the longest stretch between placeholders (`N`, `WORKER`, `…`)."""
    text = WATCH.split(f"\n**{heading}**\n", 1)[1].split("\n**", 1)[0].split("\n## ", 1)[0]
    said = [line for cells in cells_of(text) for line in re.findall(r"`([^`]+)`", cells[0])]
    assert len(said) > 5
    missing = []
    for line in said:
        stretch = max(re.split(PLACEHOLDER, line), key=len).strip(" :;,.()")
        if stretch not in messages():
            missing.append(f"{line}  ({stretch})")
    assert missing == []


def test_the_hugging_face_example_has_15_lines():
    source = (ROOT / "examples" / "finetune_hf.py").read_text(encoding="utf-8")
    code = source.split('"""')[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 15


@pytest.mark.slow
def test_ring_attention_alone_runs_on_two_ranks_and_agrees_with_one_process():
    """The example compares itself with torch's own attention and fails where they differ."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "ring_attention_alone.py")],
        env={**QUIET, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # Two processes write to one pipe, and without buffering the ends of lines come apart from the lines.
    said = re.findall(r"rank (\d) of 2: (\w+) \(", done.stdout)
    assert sorted(said) == sorted((rank, name) for rank in "01" for name in ("out", "dk", "dv"))


@pytest.mark.slow
def test_own_model_trains_through_the_loss_of_its_worker(tmp_path):
    folder = tmp_path / "own"
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "own_model.py"), "--steps", "3", "--run-dir", str(folder)],
        # A Ray of its own, not whatever else runs on this machine, that shares its cores with the tests beside it.
        env={**QUIET, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local", "RAY_worker_niceness": "0"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((folder / SUMMARY_NAME).read_text(encoding="utf-8"))
    assert summary["steps"] == 3
    assert summary["exact"]
    assert [recovery["action"] for recovery in summary["recoveries"]] == ["spare took its place"]
    assert (folder / "weights.safetensors").stat().st_size > 0


def test_each_answer_names_a_room_a_file_of_it_and_a_function_there():
    page = (ROOT / "tests" / "unit" / "project" / "twelve_questions.md").read_text(encoding="utf-8")
    answers = re.findall(r"^\| .*\? \| `([\w/]+)` \| `([\w/.]+)`, `(\w+)` \|$", page, re.MULTILINE)
    assert len(answers) == 12
    for room, file, function in answers:
        assert file.startswith(f"elastic_ring/{room}/"), file
        nodes = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        assert function in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}, (file, function)


TESTS = ROOT / "tests"


def table() -> list[list[str]]:
    """The cells of each row of "What is shown where"."""
    text = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8").split("\n| promise |", 1)[1]
    lines = text.split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_test_file_stands_in_one_row():
    """In the row that names it, else in the one that names its folder."""
    named = [place for row in table() for place in re.findall(r"`([\w./]+)`", row[1])]
    assert len(named) == len(set(named)), "no place stands in two rows"
    assert [place for place in named if not (TESTS / place).exists()] == []
    files = [path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")]
    assert len(files) > 100
    places = set(named)
    lost = [str(file) for file in files if not places & {str(file), *(str(folder) for folder in file.parents)}]
    assert lost == []


def test_few_parameter_sets_have_each_value_and_more_of_them_each_two_values():
    every = [set(zip("abc", each, strict=True)) for each in product((0, 1), (0, 1, 2), (0, 1, 2))]
    once = covering(every)
    assert len(once) == 3
    assert set().union(*(every[index] for index in once)) == set().union(*every)
    twice = covering([pairs(each) for each in every], start=once)
    assert once <= twice
    assert len(twice) < len(every) - 5
    both = {(x, y) for index in twice for x in every[index] for y in every[index]}
    assert both == {(x, y) for each in every for x in each for y in each}
    assert len(covering(every, 1)) == 1
