"""Whatever a stranger wrote into a file, its reader says so in the project's own words: no other error, no path
outside, and an end. A fuzz test for each reader, with few examples: each makes some of a right file wrong."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save as safetensors_bytes

from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.cli.settings import SettingsFile, read_toml
from elastic_ring.control.coordination import standing
from elastic_ring.costs import CostModel
from elastic_ring.data.manifest import digest_of, read_manifest
from elastic_ring.data.prepared import PreparedTokens
from elastic_ring.data.shards import TokenShards
from elastic_ring.data.tokenizer import open_tokenizer
from elastic_ring.errors import ElasticRingError, RecordDamaged
from elastic_ring.files import MAX_TOML_BYTES, name_below, plain_json, plain_toml, printable, read_small
from elastic_ring.integrations.transformers.weights import FolderWeights
from elastic_ring.monitor.journal import Journal, Link, chained
from elastic_ring.monitor.json_files import json_bytes, read_json
from elastic_ring.monitor.metrics import Summary
from elastic_ring.monitor.metrics_log import StepTable
from elastic_ring.monitor.page import page_data
from elastic_ring.monitor.report import render_status
from elastic_ring.runtime.coordinator.resume import earlier, scan_checkpoints
from elastic_ring.runtime.coordinator.run_spec import summary_of
from elastic_ring.state import sealed, snapshot
from elastic_ring.state.checkpoints import checkpoint, retention
from elastic_ring.state.checkpoints.checkpoint import Reader
from elastic_ring.state.checkpoints.manifest import NO_DIGEST
from elastic_ring.state.checkpoints.stored_weights import StoredWeights
from elastic_ring.state.header import Header
from elastic_ring.state.storage.folder import Storage
from tests.journals import journal_bytes, parse, salvage
from tests.unit.data.corpora import prepared, texts, write_jsonl, write_table
from tests.unit.state.test_checkpoint import save, shard_of

DECLARED = (ValueError, ElasticRingError)
MOST_BYTES = 1 << 29
"""Of memory that all examples of a reader may take."""
MOST_S = 20.0
"""Of CPU time; that of a reader without a bound is hours."""
NUMBERS = (-1, 0, 1, 2, 7, 1 << 31, 1 << 62, 1 << 70, -0.5, 1.5, 1e308)
NAMES = ("x", "..", "../precious/x", "/etc/passwd", "a/../../b", "a\x00b", "\x1b[2J", "s3://stranger/x", "\ud800")
ODD: list[Any] = [None, True, False, *NUMBERS, "", *NAMES, [], {}, [[]], [1, 2], {"a": {}}]
few = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate,),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


# ---------------------------------------------------------------- what a stranger does


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*at, key))


def replaced(value: Any, at: tuple[Any, ...], by: Any) -> Any:
    if not at:
        return by
    made = dict(value) if isinstance(value, dict) else list(value)
    made[at[0]] = replaced(value[at[0]], at[1:], by)
    return made


@st.composite
def wrong(draw: st.DrawFn, right: Any) -> Any:
    """A JSON value with one or two of its values replaced."""
    for _ in range(draw(st.integers(1, 2))):
        right = replaced(right, draw(st.sampled_from(list(places(right)))), draw(st.sampled_from(ODD)))
    return right


def wrong_bytes(right: bytes) -> st.SearchStrategy[bytes]:
    """The file cut, flipped, with more in it, empty, deep, or nothing of it."""
    at = st.integers(0, max(0, len(right) - 1))
    return st.one_of(
        at.map(lambda i: right[:i]),
        st.tuples(at, st.integers(1, 255)).map(
            lambda f: right[: f[0]] + bytes([right[f[0]] ^ f[1]]) + right[f[0] + 1 :]
        ),
        st.tuples(at, st.binary(max_size=9)).map(lambda f: right[: f[0]] + f[1] + right[f[0] :]),
        st.binary(max_size=64),
        st.sampled_from(
            [b"", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe" + right, b"9" * 5000, b"\x00" * 64, b"null\n"]
        ),
    )


# ---------------------------------------------------------------- what may not happen

_WATCHED: list[tuple[str, str]] = []
_PATHS = {"open", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"}
_RUNS = {"os.system", "subprocess.Popen", "pickle.find_class", "os.exec"}
_SYSTEM = ("/proc", "/sys", "/dev", "/usr", "/lib", "/etc/localtime")
_OURS = tuple(map(os.path.realpath, (sys.prefix, sys.base_prefix, Path(__file__).parents[3], *_SYSTEM)))


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if not _WATCHED:
        return
    allowed = _WATCHED[0][1]
    if event in _RUNS:
        _WATCHED.append((event, allowed))
    if event in _PATHS and isinstance(arguments[0], (str, bytes, os.PathLike)):
        where = os.path.realpath(os.fsdecode(arguments[0]))
        if not where.startswith((*_OURS, allowed)):
            _WATCHED.append((f"{event} {where}", allowed))


@pytest.fixture(scope="module", autouse=True)
def _audited() -> None:
    sys.addaudithook(_watch)  # nobody can take it away again: it looks at nothing outside `fenced`


@contextmanager
def fenced(folder: Path) -> Iterator[None]:
    """Only the declared errors come out, and Python opens, removes and starts nothing outside `folder`."""
    _WATCHED.append(("", os.path.realpath(folder)))
    try:
        yield
    except DECLARED:
        pass
    finally:
        seen = [event for event, _ in _WATCHED if event]
        _WATCHED.clear()
    assert not seen, seen


@pytest.fixture(autouse=True)
def _bounded() -> Iterator[None]:
    before_s, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - before_s < MOST_S
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < MOST_BYTES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("strangers")


# ---------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def stored(folder: Path) -> tuple[Storage, dict[str, Any]]:
    storage = Storage(str(folder / "run"))
    save(storage, 2, 1)
    return storage, json.loads(storage.read(f"{checkpoint.step_folder(5, 1)}/{checkpoint.COMMIT}"))


def resealed(plain: Any) -> bytes:
    """A manifest with the right digest, as whoever writes one can make."""
    if not isinstance(plain, dict):
        return json.dumps(plain).encode()
    text = json.dumps({**plain, "sha256": NO_DIGEST}).encode()
    return text.replace(NO_DIGEST.encode(), hashlib.sha256(text).hexdigest().encode(), 1)


def read_checkpoints(storage: Storage) -> None:
    for at in checkpoint.committed(storage):
        wrong_now = checkpoint.wrong_with(storage, at)
        retention.leftovers(storage, 0.0)
        scan_checkpoints(storage)
        if not wrong_now:
            found = checkpoint.read_manifest(storage, at)
            Reader(storage, found).fill(shard_of(0, 3, steps=0), 3)


@few
@given(data=st.data())
def test_manifests_of_checkpoints(stored, data):
    storage, right = stored
    name = f"{checkpoint.step_folder(5, 1)}/{checkpoint.COMMIT}"
    text = data.draw(st.one_of(wrong(right).map(resealed), wrong_bytes(resealed(right))))
    Path(storage.at(name)).write_bytes(text)
    with fenced(Path(storage.root)):
        read_checkpoints(storage)
    Path(storage.at(name)).write_bytes(resealed(right))


@few
@given(data=st.data())
def test_headers_of_a_checkpoint_s_files(stored, data):
    storage, right = stored
    name = right["files"][0]["name"]
    whole = storage.read(name)
    length = int.from_bytes(whole[:8], "little")
    header = data.draw(wrong(json.loads(whole[8 : 8 + length])).map(lambda value: json.dumps(value).encode()))
    storage.replace(name, [len(header).to_bytes(8, "little") + header + whole[8 + length :]])
    told = storage.digest(name)
    files = [{"name": name, "num_bytes": told.num_bytes, "sha256": told.sha256}, *right["files"][1:]]
    commit = Path(storage.at(f"{checkpoint.step_folder(5, 1)}/{checkpoint.COMMIT}"))
    commit.write_bytes(resealed({**right, "files": files}))
    with fenced(Path(storage.root)):
        read_checkpoints(storage)
    storage.replace(name, [whole])
    commit.write_bytes(resealed(right))


@few
@given(data=st.data())
def test_records_of_checkpoints_that_were_set_aside(folder, data):
    storage = Storage(str(folder / "aside"))
    precious = folder / "precious" / "x"
    precious.parent.mkdir(exist_ok=True)
    precious.write_bytes(b"years of work")
    at = checkpoint.step_folder(5, 1)
    storage.replace(f"{at}/attempt-1/shard", b"")
    right = {"reasons": ["a byte"], "manifest": json.dumps({"folder": f"{at}/attempt-1"}), "undone": False}
    inner = wrong({"folder": f"{at}/attempt-1"}).map(lambda value: {**right, "manifest": json.dumps(value)})
    text = data.draw(st.one_of(inner, wrong(right)).map(lambda value: json.dumps(value).encode()))
    storage.replace(f"{at}/0-{checkpoint.REJECTED}", text)
    with fenced(Path(storage.root)):
        retention.set_aside_checkpoints(storage)
        retention.remove_set_aside(storage)
    assert precious.read_bytes() == b"years of work"


@few
@given(data=st.data())
def test_final_weights_and_their_index(folder, data):
    at = folder / "weights"
    at.mkdir(exist_ok=True)
    tensors = safetensors_bytes({"a": torch.ones(2, 3), "b": torch.zeros(4)})
    index = {"metadata": {"total_size": 40}, "weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}
    length = int.from_bytes(tensors[:8], "little")
    header = wrong(json.loads(tensors[8 : 8 + length])).map(lambda value: json.dumps(value).encode())
    file = data.draw(
        st.one_of(
            st.just(tensors),
            wrong_bytes(tensors),
            header.map(lambda text: len(text).to_bytes(8, "little") + text + tensors[8 + length :]),
        )
    )
    names = data.draw(wrong(index)) if file == tensors else index
    (at / "one.safetensors").write_bytes(file)
    (at / "weights.safetensors.index.json").write_text(json.dumps(names))
    (at / "model.safetensors.index.json").write_text(json.dumps(names))
    with fenced(at):
        found = StoredWeights.open(at)
        [found.tensor(name) for name in found.places]
    with fenced(at):
        FolderWeights.open(at)


# ---------------------------------------------------------------- copies


@few
@given(data=st.data())
def test_copies_and_the_headers_of_shards(folder, data):
    shard = shard_of(0, 2)
    taken = snapshot.take(shard, (1, 1), snapshot.Buffers(), None)
    taken.finish()
    right = bytes(taken.data.numpy())
    head = shard.describe()[0].to_bytes()
    text = data.draw(wrong(json.loads(head)).map(lambda value: json.dumps(value).encode()))
    with fenced(folder):
        Header.from_bytes(text)
    odd = torch.frombuffer(bytearray(data.draw(wrong_bytes(right)).ljust(sealed.SEAL_BYTES, b"\0")), dtype=torch.uint8)
    for resealed_too in (False, True):
        if resealed_too:
            sealed.seal(odd)
        with fenced(folder):
            snapshot.opened(odd, "a copy")
        with fenced(folder):
            sealed.missing_piece(odd.clone(), [], "a piece")


# ---------------------------------------------------------------- a run's records


def odd_journal(records: Any) -> bytes:
    """A journal of these records, with a damaged line in place of what is no record."""
    lines, link = [], Link()
    for record in records if isinstance(records, list) else [records]:
        line, link = chained(record, link) if isinstance(record, dict) and record else (b"7\n", link)
        lines.append(line)
    return b"".join(lines)


@few
@given(data=st.data())
def test_journals_and_metrics(folder, data):
    at = folder / "journal"
    at.mkdir(exist_ok=True)
    lines = [
        {"note": "term", "term": 1, "num_lines": 0},
        {"note": "begin", "lineage": 0, "num_steps": 1, "skips": []},
        {"event": {"type": "x"}, "now": 1.0, "term": 1, "commands": [], "reason": "r"},
        {"step": 0, "loss": 1.0, "loss_hex": "0x1p0", "step_s": 1.0, "generation": 1, "mesh": {"dp": 1, "cp": 1}},
    ]
    right = journal_bytes(lines)
    odd = wrong(lines).map(odd_journal)
    text = data.draw(st.one_of(odd, wrong_bytes(right)))
    for name in ("journal.jsonl", "metrics.jsonl"):
        (at / name).write_bytes(text)
    with fenced(at):
        list(parse(text, "a journal"))
    with fenced(at):
        Journal(at / "journal.jsonl").open().close()
    with fenced(at):
        standing(salvage(text)[0])
    with fenced(at), StepTable.load(at / "metrics.jsonl", []) as table:
        list(table.lines())
    with fenced(at):
        earlier(Storage(str(at)), 0, "identity", {})


STATUS = {
    "run": "r",
    "phase": "running",
    "step": 3,
    "total_steps": 9,
    "term": 1,
    "generation": 1,
    "mesh": {"dp": 1, "cp": 2},
    "updated_unix_s": 1.0,
    "spares": [{"worker": "s"}],
    "story": ["x"],
    "covered": {"a node": "no step"},
    "members": [{"global_rank": 0, "worker": "w", "node": "n", "pid": 1, "clock": {"idle": 1.0}}],
    "recoveries": [{"cause": "a death", "step": 2, "action": "a spare", "total_s": 1.0, "steps_undone": 0}],
    "checkpoint_intervals_missed": 3,
    "checkpoint_step": 2,
}
_BITS: Any = {"losses": ["0x1p0"], "weights_sha256": "w", "samples_sha256": "s", "exact": True}
SUMMARY = Summary(steps=1, planned_steps=1, goodput=0.5, generations=[], recoveries=[], **_BITS).to_json()


@few
@given(data=st.data())
def test_status_summary_and_config_of_a_run(folder, data):
    at = folder / "records"
    at.mkdir(exist_ok=True)
    config = {"run": {"name": "r"}, "digest": "d", "versions": {"torch": "2"}, "planned_gpu_bytes": 7}
    for name, right in (("status.json", STATUS), ("summary.json", SUMMARY), ("config.json", config)):
        odd = wrong(right).map(
            lambda value: json_bytes(value) if isinstance(value, dict) else json.dumps(value).encode()
        )
        (at / name).write_bytes(data.draw(st.one_of(st.just(json_bytes(right)), odd, wrong_bytes(json_bytes(right)))))
        with fenced(at):
            read_json(at / name)
    with fenced(at):
        assert isinstance(printable(render_status(at)), str)
    with fenced(at):
        json.dumps(page_data(at), allow_nan=False)
    with fenced(at):
        summary_of(at, "identity")


@few
@given(data=st.data())
def test_settings_and_the_files_that_settings_name(folder, data):
    at = folder / "settings"
    at.mkdir(exist_ok=True)
    toml = b'preset = "laptop"\n[run]\nname = "r"\n[run.env]\nA = "b"\n[step]\nsteps = 3\n'
    odd = st.one_of(wrong_bytes(toml), st.sampled_from([b"a = " + b"[" * 50_000, b"a" + b".a" * 50_000 + b" = 1\n"]))
    (at / "config.toml").write_bytes(data.draw(odd))
    with fenced(at):
        read_toml(at / "config.toml")
    pattern = {"block": 128, "groups": [{"layers": [0, 1], "rule": "window:512"}, {"heads": ["dense", "window:128"]}]}
    (at / "pattern.json").write_bytes(data.draw(wrong(pattern).map(lambda value: json.dumps(value).encode())))
    with fenced(at):
        parse_pattern(str(at / "pattern.json"))
    machine = {"machine": {"kernel_s": 1.0}}
    (at / "machine.json").write_bytes(data.draw(wrong(machine).map(lambda value: json.dumps(value).encode())))
    with fenced(at):
        CostModel.read(at / "machine.json")


# ---------------------------------------------------------------- data


@few
@given(data=st.data())
def test_token_shards(folder, data):
    at = folder / "shards"
    at.mkdir(exist_ok=True)
    table = pa.table({"tokens": pa.array([[1, 2, 3], [4, 5], [6]], pa.list_(pa.int32()))})
    sink, arrow = pa.BufferOutputStream(), pa.BufferOutputStream()
    pq.write_table(table, sink)
    with pa.ipc.new_file(arrow, table.schema) as writer:
        writer.write_table(table)
    for name, right in (("a.parquet", sink), ("b.arrow", arrow)):
        (at / name).write_bytes(data.draw(wrong_bytes(right.getvalue().to_pybytes())))
        with fenced(at):
            source = TokenShards(2, str(at / name), vocab_size=100, end_of_document=99).open()
            [source.read(number) for number in range(min(4, source.num_sequences))]


@pytest.fixture(scope="module")
def corpus(folder: Path) -> dict[str, Any]:
    prepared(folder / "corpus", write_jsonl(folder / "input" / "a.jsonl", texts(9)))
    found: dict[str, Any] = json.loads((folder / "corpus" / "manifest.json").read_text())
    return found


@few
@given(data=st.data())
def test_manifests_and_shards_of_a_corpus(folder, corpus, data):
    at = folder / "corpus"
    right = {key: value for key, value in corpus.items() if key != "about"}
    plain = data.draw(wrong(right))
    if isinstance(plain, dict):
        plain = {**plain, "digest": digest_of(plain)}
    text = data.draw(st.one_of(st.just(json.dumps(plain).encode()), wrong_bytes(json.dumps(corpus).encode())))
    (at / "manifest.json").write_bytes(text)
    with fenced(at):
        read_manifest(str(at / "manifest.json"))
        opened = PreparedTokens.of(str(at / "manifest.json"), 32).open()
        opened.read(0)


@few
@given(data=st.data())
def test_documents_of_every_kind(folder, data):
    at = folder / "documents"
    kinds: dict[str, Callable[[Path], Path]] = {
        "a.jsonl": lambda path: write_jsonl(path, texts(3)),
        "b.parquet": lambda path: write_table(path, texts(3)),
        "c.arrow": lambda path: write_table(path, texts(3)),
        "d.csv": lambda path: path,
    }
    name = data.draw(st.sampled_from(sorted(kinds)))
    write_jsonl(at / "right.jsonl", texts(2))
    path = kinds[name](at / name)
    right = path.read_bytes() if path.exists() else b"text,other\none,1\n"
    path.write_bytes(data.draw(wrong_bytes(right)))
    out = folder / f"prepared-{time.monotonic_ns()}"
    with fenced(folder):
        prepared(out, at, max_bad_share=1.0)
    path.unlink()


@few
@given(data=st.data())
def test_folders_of_tokenizers(folder, data):
    tokenizers = pytest.importorskip("tokenizers")
    at = folder / "tokenizer"
    at.mkdir(exist_ok=True)
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<end>": 2}, unk_token="a"))
    right, config = json.loads(made.to_str()), {"eos_token": {"content": "<end>"}}
    (at / "tokenizer.json").write_text(json.dumps(data.draw(st.one_of(st.just(right), wrong(right)))))
    (at / "tokenizer_config.json").write_text(json.dumps(data.draw(st.one_of(st.just(config), wrong(config)))))
    with fenced(at):
        open_tokenizer(str(at)).encode([b"a b", b""])


# ---------------------------------------------------------------- what all of them use


@few
@given(
    name=st.one_of(
        st.sampled_from(ODD),
        st.text(max_size=20),
        st.lists(st.sampled_from(["..", ".", "", "a", "\x00"])).map("/".join),
    )
)
def test_a_name_from_a_file_stays_in_its_folder(name):
    try:
        found = name_below(name)
    except ValueError:
        return
    assert os.path.normpath(os.path.join("/run", found)) == f"/run/{found}"


@few
@given(text=st.text())
def test_nothing_that_is_shown_moves_the_cursor(text):
    shown = printable(f"x{text}\x1b[2J\x9b\u202e\ud800")
    assert not any((sign < " " and sign not in "\n\t\r") or "\x7f" <= sign <= "\x9f" for sign in shown)
    assert "\r" not in shown.replace("\r\n", "")
    shown.encode()
    assert printable("\x1b[1m\x1b[32mfine\x1b[0m") == "fine"


LONG_KEYS = [
    "a" + ".a" * 64 + " = 1\n",
    '"a"' + ".a" * 64 + " = 1\n",
    '\'=\'."#\\""' + " . 'a'" * 64 + " = 1\n",
    "[run]\nenv = { b = 1, " + "a." * 64 + "a = 1 }\n",
    "[" + "a." * 20_000 + "a]\n",
    "ä.b" + '. "\\""' * 64 + "= 1\n",
]


@pytest.mark.parametrize("text", LONG_KEYS)
def test_a_key_of_many_parts_is_refused_wherever_it_stands(text):
    with pytest.raises(ValueError, match="more than 64 parts"):
        plain_toml(text.encode())


def test_many_dots_that_are_no_key_are_read_and_the_look_for_keys_ends():
    rows = "a = [\n" + f"  {', '.join(['1.5'] * 70)},\n" * 3 + "]\n" + f"b = '{'. ' * 200}'  # {'.' * 200}\n"
    assert len(plain_toml(rows.encode())["a"]) == 210
    assert plain_toml(("a." * 63 + "a = 1").encode())
    begun = time.process_time()
    for odd in ("a", '"', "'", '\\"', "a ", '"a"', '"."', "a.", "a . \t"):
        with suppress(ValueError):
            plain_toml((odd * (MAX_TOML_BYTES // len(odd))).encode())
    assert time.process_time() - begun < MOST_S


def test_a_file_that_the_user_names_may_be_a_pipe_of_some_length(tmp_path):
    for text, told in ((b"preset = '100m'", ""), (b"#" * (MAX_TOML_BYTES + 1), "has more than")):
        ends = os.pipe()
        with ThreadPoolExecutor() as pool, suppress(BrokenPipeError):
            writes = pool.submit(lambda end=ends[1], said=text: (os.write(end, said), os.close(end)))
            with pytest.raises(ValueError, match=told) if told else nullcontext():
                assert read_toml(Path(f"/dev/fd/{ends[0]}")) == SettingsFile(texts={"preset": "100m"})
            os.close(ends[0])
            writes.result()


def test_what_is_no_file_is_not_waited_for_and_what_is_too_long_or_too_deep_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RecordDamaged, match="no regular file"):
        read_json(tmp_path / "pipe")
    with (tmp_path / "long").open("wb") as file:
        file.truncate(1 << 40)
    for reader in (read_json, read_small):
        with pytest.raises((ValueError, RecordDamaged), match="more than"):
            reader(tmp_path / "long")
    for text in ("[" * 100_000, "[" * 65 + "]" * 65, '{"a":' * 65 + "1" + "}" * 65):
        with pytest.raises(ValueError, match="deeper than 64 levels"):
            plain_json(text)
    assert plain_json("[" * 64 + "]" * 64)
    records, flaws = salvage(b"[" * 100_000 + b"\n" + journal_bytes([{"a": 1}]))
    assert (records, flaws[0].line) == ([{"a": 1}], 1)
