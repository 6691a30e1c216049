"""Private names of earlier versions must not return: the field's term is used instead, one word for one meaning."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.unit.project.counters import no_names

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("elastic_ring", "benchmarks", "experiments", "jobs", "tune", "tests", "examples")


def table(text: str) -> dict[str, str]:
    return dict(pair.strip().split(": ") for pair in text.split(";"))


FILES = table("""
    lookout: node_monitor; charter: run_spec; card: worker_spec; chronicle: run_recorder; records: step_records;
    audience: driver_feed; mail: coordinator_client; lifeline: rpc; joined: batched_p2p; standstill: stall_watchdog;
    troubles: error_classifier; chips: gpu_leases; bits: env_fingerprint; contexts: cuda_contexts; opening: startup;
    ending: shutdown; remembered: cached; own_sums: kv_grad_accumulation; readers: query_index; rehearsal: warmup;
    summaries: block_means; picture: plot; spec: parse; machine: cost_model; pieces: transformer; rungs: fidelity;
    attending: attention_context; injection: faults
""")
CLASSES = table("""
    Audience: DriverFeed; Card: WorkerSpec; Charter: RunSpec; Chip: Gpu; Chronicle: RunRecorder; Claim: GpuLease;
    Crew: Membership; KeptWithin: SizedLRU; KeySums: KvGradAccumulation; Lifeline: AgentServer;
    Line: JsonConnection; Lookout: NodeMonitor; Mail: CoordinatorClient; Oddities: NondeterminismLog;
    Settling: ContextReleaser; Short: NotEnoughWorkers; Silence: NullProcessGroup; Stand: Standby;
    Standstill: StallWatchdog; StoodStill: StallDetected; Switchboard: AgentServer; Turn: Transition;
    Unheld: ShardLost; Wires: ProcessGroups
""")
WORDS = table("""
    audience: driver_feed; cast: membership_id; charter: run_spec; chip: gpu; chips: gpus; chronicle: recorder;
    crew: membership; lifeline: rpc; lookout: node_monitor; mail: coordinator_client; oddities: nondeterminism_log;
    rehearsal: warmup; rehearse: warm_up; rehearsed: warmed_up; rung: fidelity; rungs: fidelities;
    seat: coordinates; standstill: stall_watchdog; strike: inject, or gpu_failure; strikes: gpu_failures;
    switchboard: agent_server; trouble: error; troubles: errors; remembered: cached; unheld: shard_lost;
    wires: process_groups
""")
"""A word of an identifier or key -> what to say. Only words that mean nothing else in this code."""

SINGULARS = "audience charter chronicle crew lifeline lookout rehearsal rung seat standstill strike switchboard trouble"
OTHER_FORMS = {"oddities", "parked", "rehearse", "rehearsed", "rehearses", "rehearsing", "seated", "unheld"}
PROSE = {word + ending for word in SINGULARS.split() for ending in ("", "s")} | OTHER_FORMS
"""Words that no text may have: comments, docstrings, log lines, pages, dated results."""
ANY = re.compile("|".join(sorted(PROSE)))
SUFFIXES = {".html", ".md", ".py", ".sh", ".yaml", ".yml"}
SEEDS = ("seats of {seed}", "own troubles of {seed}", "Intended Audience")  # texts from which random schedules follow

OF_OTHERS = {"autocast", "cast_forward_inputs", "cast"}  # torch's; `typing.cast`


@cache
def modules() -> tuple[Path, ...]:
    return tuple(sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path != Path(__file__)))


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of every function, argument, variable, attribute, keyword and dictionary key."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield line, name
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield line, name
            case ast.Dict(keys=keys):
                yield from (
                    (line, key.value) for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)
                )
            case ast.Subscript(slice=ast.Constant(value=str(name))):
                yield line, name
            case _:
                pass


def words(name: str) -> set[str]:
    """`_bad_chips` -> bad, chips; `NodeLost` -> node, lost."""
    return {part.lower() for part in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}


def test_no_file_has_a_name_of_earlier_versions():
    old = [
        f"{path.relative_to(ROOT)}: say {FILES[stem]}"
        for path in modules()
        if (stem := path.stem.removeprefix("test_")) in FILES
        and not (stem == "records" and path.parent == ROOT / "benchmarks" / "quality")  # of its own results
    ]
    folders = {part for path in modules() for part in path.relative_to(ROOT).parts[:-1]}
    assert old == []
    assert folders & set(FILES) == set()


def test_no_identifier_or_key_has_a_name_or_word_of_earlier_versions():
    old = []
    for path in modules():
        for line, name in sorted(set(identifiers(ast.parse(path.read_text(encoding="utf-8"))))):
            instead = {CLASSES[bare] for bare in {name.lstrip("_")} & set(CLASSES)}
            if name not in OF_OTHERS:
                instead |= {WORDS[word] for word in known_words(name)}
            old += [f"{path.relative_to(ROOT)}:{line} {name}: say {term}" for term in sorted(instead)]
    assert old == []


@cache
def known_words(name: str) -> frozenset[str]:
    return frozenset(words(name) & set(WORDS))


@cache
def texts() -> tuple[Path, ...]:
    """Every file of prose or code: pages, comments, docstrings, log lines, manifests."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile"]
    folders = [ROOT / folder for folder in (*FOLDERS, "docs", "deploy")]
    found = (path for folder in folders for path in folder.rglob("*") if path.suffix in SUFFIXES)
    return tuple(sorted(path for path in [*pages, *found] if path != Path(__file__)))


def said(text: str) -> Iterator[tuple[int, str]]:
    """(line, word of earlier versions) of any text, plurals included."""
    for number, line in enumerate(text.splitlines(), 1):
        if ANY.search(line.lower()) and not any(kept in line for kept in SEEDS):
            yield from ((number, word) for part in re.findall(r"[A-Za-z]+", line) for word in words(part) & PROSE)


def test_no_text_has_a_word_of_earlier_versions():
    found = [
        f"{path.relative_to(ROOT)}:{line} {word}"
        for path in texts()
        for line, word in said(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_the_search_finds_what_it_looks_for():
    source = "def f(crew):\n    self._bad_chips = {'rung': 1}\n    g(strike=x['cast'])"
    found = {word for _, name in identifiers(ast.parse(source)) for word in words(name) & set(WORDS)}
    assert found == {"crew", "chips", "rung", "strike", "cast"}
    text = "# the lookouts saw it\nlog.info('parked %s', own_trouble)\nA picture."
    assert list(said(text)) == [(1, "lookouts"), (2, "parked"), (2, "trouble")]


def test_no_binding_of_the_package_is_a_word_that_names_no_thing():
    """Targets, parameters, fields and attributes of self that are exactly such a word (`counters.NO_NAMES`)."""
    assert no_names() == []
