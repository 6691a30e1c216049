"""Who parses what may be a stranger's, and where names in it pass `name_below`, through which alone they become paths.

A new reader is found by its parser, and has to be listed: with the function that checks its names, or with the reason
that it has none. Those without names make no path of what they parse.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise

import pytest

from tests.unit.project.counters import Function, last_name, modules

ROOMS = ("data", "state", "integrations", "runtime")
PARSERS = {"plain_json", "plain_toml", "parse_json", "read_json", "readable_json", "read_object", "salvage_file"}
PARSERS |= {"validate_json", "validate_python", "model_validate", "safe_open", "read_places", "from_pretrained"}
MODULES = {"json", "pickle", "tomllib", "torch"}
GUARDS = {"name_below", "attempt_in", "_checkpoint_name"}
"""The function, and those that are tested to call it."""
PATHS = {"Path", "joinpath", "at", "open", "read", "read_record", "read_small", "Storage", "exists", "remove"}

CHECKED = {
    "data.listing _names_in": "data.listing _names_in",
    "data.manifest read_manifest": "data.manifest Shard.__post_init__",
    "data.preparation.piece read_record": "data.manifest Shard.__post_init__",
    "data.preparation.pipeline over_cluster": "data.manifest Shard.__post_init__",
    "data.tokenizer open_saved": "data.tokenizer open_saved",
    "integrations.transformers.weights FolderWeights.open": "integrations.transformers.weights FolderWeights.open",
    "runtime.coordinator.resume _Stored.of": "runtime.coordinator.resume _Stored.of",
    "state.checkpoints.manifest Manifest.from_json": "state.checkpoints.manifest Manifest._check",
    "state.checkpoints.retention _record": "state.checkpoints.retention _record",
    "state.checkpoints.weight_files read_index": "state.checkpoints.weight_files read_index",
}
"""Reader -> where names in its file are checked."""
WRITTEN_HERE = "what this process, its parent or its driver has written"
NAMELESS = {
    "numbers, tensors, and texts that are compared or shown": {
        "data.preparation.materialise materialised",
        "data.preparation.prepare claim",
        "integrations.ray_train.engine Zero3Engine._restore_fragments",
        "runtime.coordinator.resume _status",
        "runtime.coordinator.run_files RunFiles.write_summary",
        "runtime.coordinator.run_spec set_aside",
        "runtime.coordinator.run_spec summary_of",
        "runtime.coordinator.startup Reading.read",
        "runtime.coordinator.startup _set_damaged_aside",
        "runtime.driver.attach begun_by",
        "runtime.driver.attach end_on_record",
        "runtime.driver.submission read_record",
        "runtime.gpu.leases failures_of",
        "runtime.gpu.leases last_owner",
        "runtime.run_storage _current_term",
        "runtime.run_storage forget_end",
        "runtime.terms Terms._claim_of",
        "state.checkpoints.manifest Manifest._check",
        "state.checkpoints.retention kept_checkpoint",
        "state.checkpoints.zero3 _state_of",  # files that a listing has, or has not
        "state.header Header.from_bytes",
        "state.header ShardMeta.from_plain",
    },
    "the text and the token that ends it": {
        "data.preparation.chat ChatTokenizer.encode",
        "data.preparation.chat _parsed",
        "data.preparation.chat _with_call_arguments",
        "data.preparation.documents _parse_json",
        "data.tokenizer open_tokenizer",
    },
    "names of tensors": {
        "integrations.transformers.weights FolderWeights.tensor",
        "state.checkpoints.checkpoint Reader._place",
        "state.checkpoints.stored_weights _places",
        "state.safetensors read_places",
        "integrations.ray_train.engine check_names",  # of which DeepSpeed makes paths: they must be the model's
    },
    "a config; the folder that a user's own run began from": {
        "integrations.ray_train.settings read_deepspeed",
        "integrations.transformers.checks read_object",
        "integrations.transformers.export _Trained.read",
        "integrations.transformers.export_card training_rows",
        "integrations.transformers.text_part read_config",
    },
    WRITTEN_HERE: {
        "data.preparation.pipeline _PoolWorker.__call__",
        "data.preparation.prepare plan_of",
        "integrations.ray_train.trainer Zero3Trainer._config",
        "integrations.transformers.lora AdapterValues._empty",
        "integrations.transformers.model FirstValues._empty",
        "integrations.transformers.model RingModel.config",
        "integrations.transformers.model RingModel.ring_parts",
        "runtime.agent.launch main",
        "runtime.driver.submission Submission.settings_record",
    },
    "messages": {
        "runtime.agent.notices aws",
        "runtime.agent.notices azure",
        "runtime.agent.rpc JsonConnection.receive",
    },
}
"""Why readers give no names that become paths."""


@cache
def functions() -> dict[str, Function]:
    """By module and qualified name; one in another is its outer one's."""
    return {
        f"{module.dotted_name.removeprefix('elastic_ring.')} {name}": node
        for room in ROOMS
        for module in modules(f"elastic_ring/{room}")
        for name, node in named_functions(ast.parse(module.path.read_bytes()))
    }


def named_functions(node: ast.AST, outer: str = "") -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from named_functions(child, f"{outer}{child.name}.")
        elif isinstance(child, Function):
            yield f"{outer}{child.name}", child


def parses(node: ast.AST) -> bool:
    function = node.func if isinstance(node, ast.Call) else None
    is_loader = isinstance(function, ast.Attribute) and function.attr in ("load", "loads")
    return last_name(function or node) in PARSERS or (is_loader and last_name(function.value) in MODULES)


def calls(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(part, ast.Call) and last_name(part.func) in names for part in ast.walk(node))


def parts_of(node: ast.AST) -> Iterator[ast.AST]:
    """All of it but what a condition asks."""
    yield node
    for name, child in ast.iter_fields(node):
        if not (isinstance(node, ast.IfExp) and name == "test"):
            children = child if isinstance(child, list) else [child]
            yield from (part for each in children if isinstance(each, ast.AST) for part in parts_of(each))


def paths_of_parsed(function: Function) -> list[str]:
    """Where it joins what it parses to a path, or opens that."""
    known: set[str] = set()

    def is_parsed(node: ast.AST | None) -> bool:
        return node is not None and any(
            parses(part) if isinstance(part, ast.Call) else isinstance(part, ast.Name) and part.id in known
            for part in parts_of(node)
        )

    for _ in range(4):  # a name may come of a later one, in a loop
        for node in ast.walk(function):
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and is_parsed(node.value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            elif isinstance(node, ast.For | ast.comprehension) and is_parsed(node.iter):
                targets = [node.target]
            parts = [part for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
            known |= {part.id for part in parts if isinstance(part.ctx, ast.Store)}
    return [ast.unparse(node) for node in ast.walk(function) if is_path_of(node, is_parsed)]


def is_path_of(node: ast.AST, is_parsed: Callable[[ast.AST], bool]) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Div) and is_parsed(node.right)
    if isinstance(node, ast.Call):
        joins = (
            isinstance(node.func, ast.Attribute) and node.func.attr == "join" and last_name(node.func.value) == "path"
        )
        return (joins or last_name(node.func) in PATHS) and any(map(is_parsed, node.args))
    texts = node.values if isinstance(node, ast.JoinedStr) else []
    return any(
        isinstance(before, ast.Constant) and str(before.value).endswith("/") and is_parsed(name)
        for before, name in pairwise(texts)
    )


def readers() -> set[str]:
    return {name for name, function in functions().items() if any(map(parses, ast.walk(function)))}


def test_every_reader_is_listed_with_where_its_names_are_checked_or_why_it_has_none():
    nameless = [name for names in NAMELESS.values() for name in names]
    assert sorted([*CHECKED, *nameless]) == sorted(readers())


@pytest.mark.parametrize(("reader", "check"), CHECKED.items(), ids=list(CHECKED))
def test_names_that_a_reader_gives_pass_the_one_function(reader, check):
    assert calls(functions()[check], GUARDS)


def test_those_between_call_the_one_function_and_a_reader_without_names_makes_no_path_of_what_it_parses():
    between = {name: node for name, node in functions().items() if name.split()[1] in GUARDS}
    assert len(between) == len(GUARDS) - 1
    assert all(calls(node, {"name_below"}) for node in between.values())
    foreign = [name for reason, names in NAMELESS.items() for name in names if reason != WRITTEN_HERE]
    joins = {name: paths_of_parsed(functions()[name]) for name in foreign}
    assert {name: where for name, where in joins.items() if where} == {}


@pytest.mark.parametrize(
    "line",
    [
        "return [folder / file for file in record['files']]",
        "for file in record.values():\n  last = Path(folder, file)",
        "return open(os.path.join(folder, record['file']))",
        "name = record.get('file')\n return storage.read(f'{folder}/{name}')",
    ],
)
def test_a_new_reader_that_makes_paths_is_found(line):
    (function,) = ast.parse(f"def new(folder):\n record = plain_json(read_small(folder / 'index'))\n {line}").body
    assert isinstance(function, ast.FunctionDef)
    assert any(map(parses, ast.walk(function)))
    assert paths_of_parsed(function)
    assert not calls(function, GUARDS)
