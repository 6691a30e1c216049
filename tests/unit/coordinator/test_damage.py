"""Every file that a run keeps, emptied, cut in half, with a byte flipped, removed, and a stranger's in its place.

The folder is what the run's own writers leave; a submission then decides as one on Ray does, up to the first worker.
`TABLE` is also the one of docs/guarantees.md.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elastic_ring import ElasticRingTrainer
from elastic_ring.cli import checkpoints as checkpoints_command
from elastic_ring.cli import status as status_command
from elastic_ring.config import CheckpointConfig, RunConfig, StepConfig
from elastic_ring.control.coordination import term_note
from elastic_ring.data.source import StdlibText
from elastic_ring.errors import CheckpointDamaged
from elastic_ring.mesh import Mesh
from elastic_ring.model.config import preset
from elastic_ring.model.transformer import Transformer
from elastic_ring.monitor.callbacks import Callback
from elastic_ring.monitor.journal import Journal
from elastic_ring.monitor.metrics import StepMetrics, Summary, read_metrics, write_json
from elastic_ring.monitor.metrics_log import MetricsLog
from elastic_ring.runtime.agent.messages import Said
from elastic_ring.runtime.coordinator.resume import find_resume
from elastic_ring.runtime.coordinator.run_spec import RunSpec
from elastic_ring.runtime.coordinator.startup import Startup, open_run
from elastic_ring.runtime.driver.follow import Follower
from elastic_ring.runtime.run_storage import check_writable
from elastic_ring.runtime.terms import Terms
from elastic_ring.state.checkpoints.checkpoint import Reader, committed
from elastic_ring.state.checkpoints.manifest import read_manifest
from elastic_ring.state.storage.folder import Storage
from elastic_ring.train.optim import OptimConfig
from tests.journals import salvage
from tests.unit.coordinator.test_checkpoints import CP, Run
from tests.unit.state.test_checkpoint import shard_of

STEP_2, STEP_4 = (f"checkpoints/step-0000000{step}/lineage-000" for step in (2, 4))
DAMAGES = ("emptied", "cut in half", "a byte flipped", "removed", "a stranger's")
TABLE = {
    # file: what happens, for each of DAMAGES
    "`COMMIT.json` of the newest checkpoint": ("before",) * 5,
    "a shard of it": ("before", "before", "read, then before", "before", "read, then before"),
    "`COMMIT.json` of an older one": ("aside", "aside", "aside", "goes on", "aside"),
    "`lineages/000.json`": ("aside", "aside", "aside", "goes on", "aside"),
    "`journal.jsonl`": ("moved", "moved", "aside", "goes on", "moved"),
    "`metrics.jsonl`": ("gap", "gap", "aside, gap", "gap", "aside, gap"),
    "`status.json`": ("aside", "aside", "aside", "goes on", "moved"),
    "`summary.json` of a finished run": ("aside", "aside", "aside", "goes on", "aside"),
    "`config.json`": ("aside", "aside", "aside", "goes on", "refused"),
    "`callbacks.json`": ("aside", "aside", "aside", "goes on", "aside"),
    "`terms/000001`": ("goes on",) * 5,
    "`config.toml`, `loss.png`": ("goes on",) * 5,
}
FILES = {
    "`COMMIT.json` of the newest checkpoint": f"{STEP_4}/COMMIT.json",
    "a shard of it": f"{STEP_4}/attempt-*/shard-00000-part-00000.safetensors",
    "`COMMIT.json` of an older one": f"{STEP_2}/COMMIT.json",
    "`lineages/000.json`": "lineages/000.json",
    "`journal.jsonl`": "journal.jsonl",
    "`metrics.jsonl`": "metrics.jsonl",
    "`status.json`": "status.json",
    "`summary.json` of a finished run": "summary.json",
    "`config.json`": "config.json",
    "`callbacks.json`": "callbacks.json",
    "`terms/000001`": "terms/000001",
    "`config.toml`, `loss.png`": "loss.png",
}


def trainer_of(folder: Path, name: str = "damaged", seed: int = 0, steps: int = 6) -> ElasticRingTrainer:
    run = RunConfig(name, run_dir=str(folder), checkpoint_config=CheckpointConfig(every_steps=2, keep_last=9))
    step = StepConfig(steps=steps, global_batch=4, context_tokens=96, seed=seed)
    trainer = ElasticRingTrainer(
        partial(Transformer, preset("laptop")),
        StdlibText(96),
        run_config=run,
        step_config=step,
        optim_config=OptimConfig(total_steps=6),
        callbacks=(Callback(),),
    )
    trainer.config_files["config.toml"] = f"seed = {seed}\n"
    return trainer


def spec_of(trainer: ElasticRingTrainer, attempt: str, **more: Any) -> RunSpec:
    run = trainer.run_config
    return RunSpec(run, trainer.scaling_config, trainer.task, attempt, "", "", trainer.submission().identity, **more)


def step_of(step: int, seed: int) -> StepMetrics:
    return StepMetrics(step, 2.0 + seed, 1.0, 0.1, 384, 1000.0, 0.1, False, 1, Mesh(2, 2), 4, samples=f"{seed}-{step}")


def written(folder: Path, name: str = "damaged", seed: int = 0) -> Path:
    """A run's folder after four steps of a submission, with checkpoints of two and four."""
    trainer = trainer_of(folder, name, seed)
    spec = spec_of(trainer, "first")
    identity = trainer.submission().identity.digest
    open_run(spec, Terms(spec.run), is_restart=False, remaining=list, clear=list)
    with Journal(folder / "journal.jsonl") as journal:
        journal.append(term_note(1, 0))
        journal.append(
            {"note": "begin", "attempt": "first", "now": 1.0, "run": name, "identity": identity, "lineage": 0}
        )
        for number in range(3):
            journal.append({"note": "generation", "generation": number})
    with MetricsLog(folder).open(identity) as log:
        for step in range(4):
            log.record(step_of(step, seed))
    told = {"name": name, "settings": trainer.submission().identity.entries}
    run = Run(folder, trainer.run_config.checkpoint_config, identity=identity, facts=told)
    run.commit(2)
    run.commit(4)
    assert run.keeper.close(60.0)
    trainer.submission().write_record()
    write_json(folder / "status.json", {"run": name, "ended": True, "updated_unix_s": 1.0, "step": 4, "end": {}})
    bits: Any = {"losses": [(2.0 + seed).hex()] * 4, "weights_sha256": "w", "samples_sha256": "s"}
    ended: Any = {"steps": 4, "planned_steps": 4, "goodput": 1.0, "exact": True, "identity": identity}
    summary = Summary(generations=[], recoveries=[], **ended, **bits)
    write_json(folder / "summary.json", summary.to_json())
    (folder / "loss.png").write_bytes(b"\x89PNG and more")
    (folder / "weights.safetensors").write_bytes(b"what the summary tells of")
    with Follower(trainer.submission(), trainer.callbacks).delivery() as delivery:
        delivery.deliver()
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run and a stranger, which has another seed and another name."""
    folder = tmp_path_factory.mktemp("runs")
    return written(folder / "run"), written(folder / "stranger", "stranger", seed=1)


def empty(path: Path, other: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes() or b"?")
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def remove(path: Path, other: Path) -> None:
    path.unlink()


def replace_by_strangers(path: Path, other: Path) -> None:
    shutil.copyfile(other, path)


HOW: tuple[Callable[[Path, Path], None], ...] = (empty, cut, flip, remove, replace_by_strangers)


@dataclass
class Decided:
    """What a submission decides, up to the first worker."""

    is_finished: bool = False
    step: int = -1
    told: list[str] = field(default_factory=list)
    startup: Startup | None = None


def submitted(folder: Path, steps: int, caplog: pytest.LogCaptureFixture) -> Decided:
    """As `ElasticRingTrainer.fit`, its coordinator, and the keeper of its checkpoints."""
    caplog.clear()
    trainer = trainer_of(folder, steps=steps)
    if trainer.submission().finished_summary() is not None:
        return Decided(is_finished=True)
    check_writable(folder)
    resume = trainer.submission().find_resume()
    told = list(resume.damaged.values())
    spec = spec_of(trainer, "second", resume=resume)
    startup = open_run(spec, Terms(spec.run), is_restart=False, remaining=list, clear=list)
    identity, config = trainer.submission().identity, trainer.run_config.checkpoint_config
    run = Run(folder, config, resume, startup.term, identity.digest, facts={"settings": identity.entries})
    checkpoint, told_later = restored(run, folder)
    assert run.keeper.close(60.0)
    trainer.submission().write_record()
    with MetricsLog(folder).open(identity.digest) as log:
        log.begin_at(checkpoint)
        assert all(line["loss"] == 2.0 for line in read_metrics(folder)), "none of another run's"
    with Follower(trainer.submission(), trainer.callbacks).delivery() as delivery:
        delivery.deliver()
    told += [*startup.remarks, *told_later, *(record.getMessage() for record in caplog.records)]
    return Decided(step=checkpoint, told=told, startup=startup)


def restored(run: Run, folder: Path) -> tuple[int, list[str]]:
    """The step that the members begin at, as each reads its shard: the newest checkpoint that verifies."""
    told: list[str] = []
    counting = run.last
    while True:
        newest = counting[-1]
        reader = Reader(Storage(str(folder)), read_manifest(Storage(str(folder)), newest.folder))
        try:
            for cp_rank in range(CP):
                reader.fill(shard_of(cp_rank, CP, steps=0), CP)
            return newest.step, told
        except CheckpointDamaged as error:
            run.keeper.damaged(newest.folder, error.message)
            told.append(run.next(Said).text)
            counting = run.listed()


SLOW = [
    (file, n)
    for file, cells in TABLE.items()
    for n in range(5)
    if cells == ("goes on",) * 5 or (n == 1 and FILES[file].endswith(".json") and "COMMIT" not in file)
]
CASES = [
    pytest.param(file, n, id=f"{FILES[file]}-{DAMAGES[n]}", marks=[pytest.mark.slow] * ((file, n) in SLOW))
    for file in TABLE
    for n in range(len(DAMAGES))
]


@pytest.mark.parametrize(("file", "number"), CASES)
def test_each_file_that_a_run_keeps_may_be_damaged_in_each_way(runs, file, number, tmp_path, caplog, capsys):
    folder, (own, stranger) = tmp_path / "run", runs
    shutil.copytree(own, folder)
    # The stranger's shards of this step have the same bytes.
    at_other = FILES[file].replace(f"{STEP_4}/attempt", f"{STEP_2}/attempt")
    (path,), (other,) = folder.glob(FILES[file]), stranger.glob(at_other)
    HOW[number](path, other)
    looked_at(folder, file, DAMAGES[number], capsys)
    expected = TABLE[file][number]
    is_summary = path.name == "summary.json"
    if expected == "refused":
        with pytest.raises(ValueError, match=r"holds run 'stranger', not 'damaged'.*submit it under its own name"):
            submitted(folder, 6, caplog)
        return
    found = submitted(folder, 4 if is_summary else 6, caplog)
    assert not found.is_finished
    assert found.step == (2 if expected.endswith("before") else 4)
    told = "\n".join(found.told)
    name = str(path.relative_to(folder))
    where = name.rpartition("/attempt-")[0] or name.removesuffix("/COMMIT.json")
    if expected == "goes on" or (expected == "before" and DAMAGES[number] == "removed" and path.name == "COMMIT.json"):
        assert told == ""
    elif expected != "moved":
        assert where in told
        assert max(map(len, found.told)) < 700
    aside = [*folder.glob(f"{name}.damaged-*"), *folder.glob(f"{where}/*-REJECTED.json")]
    assert len(aside) == ("aside" in expected or (expected.endswith("before") and told != ""))
    of_each_attempt = ("metrics.jsonl", "callbacks.json", "summary.json", "journal.jsonl", "status.json", "loss.png")
    assert path.name in of_each_attempt or (folder / f"attempt-001/{path.name}").exists() == (expected == "moved")
    assert ("has no lines of" in told) == ("gap" in expected)


def looked_at(folder: Path, file: str, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What people look at the folder with says what is damaged, and never ends with a traceback."""
    commands: list[tuple[Callable[[list[str]], int], list[str]]] = [
        (status_command.main, [str(folder)]),
        (checkpoints_command.main, ["list", str(folder)]),
        (checkpoints_command.main, ["verify", str(folder)]),
    ]
    for command, arguments in commands:
        code = command(arguments)
        out, err = capsys.readouterr()
        assert code in (0, 1), (arguments, err)
        assert "Traceback" not in out + err
        now = TABLE[file][DAMAGES.index(damage)]
        if command is status_command.main and "aside" in now and damage != "a stranger's":
            assert Path(FILES[file]).name in out or "lineages" in file or "COMMIT" in file or "callbacks" in file, now
        if arguments[0] == "verify" and file == "a shard of it":
            assert (code, "WRONG" in out) == (1, True)


def test_a_finished_run_is_finished_and_from_its_checkpoints_alone_it_goes_on_from_the_newest(runs, tmp_path, caplog):
    shutil.copytree(runs[0], tmp_path / "run")
    assert submitted(tmp_path / "run", 4, caplog).is_finished
    (tmp_path / "run" / "weights.safetensors").unlink()
    with pytest.raises(ValueError, match=r"summary\.json says that all steps are done, and the weights are not there"):
        submitted(tmp_path / "run", 4, caplog)
    shutil.copytree(runs[0] / "checkpoints", tmp_path / "bare" / "checkpoints")
    found = submitted(tmp_path / "bare", 6, caplog)
    assert found.step == 4
    assert [line for line in found.told if "has no lines of 4 step(s), 0 to 3" in line]
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="holds other files"):
        check_writable(tmp_path / "photos")


def test_a_newer_lineage_whose_checkpoints_are_damaged_gives_way_to_whole_ones_before_it(runs, tmp_path, caplog):
    folder = tmp_path / "run"
    shutil.copytree(runs[0], folder)
    (newer := folder / "checkpoints/step-00000001/lineage-001").mkdir(parents=True)
    (newer / "COMMIT.json").touch()
    found = submitted(folder, 6, caplog)
    assert found.step == 4
    assert "step-00000001/lineage-001/COMMIT.json is no manifest" in "\n".join(found.told)
    assert list(newer.glob("*-REJECTED.json"))
    for commit in folder.glob("checkpoints/*/lineage-000/COMMIT.json"):
        commit.unlink()
    with pytest.raises(ValueError, match=r"every checkpoint in .* was set aside or is damaged"):
        submitted(folder, 6, caplog)


def test_a_checkpoint_in_a_folder_of_another_name_does_not_count_for_anybody(runs, tmp_path, caplog, capsys):
    folder = tmp_path / "run"
    shutil.copytree(runs[0], folder)
    shutil.copytree(folder / STEP_4, folder / "checkpoints/step-00000009/lineage-000")
    shutil.copytree(folder / STEP_4, folder / "checkpoints/step-00000004-kept/lineage-000")
    assert checkpoints_command.main(["list", str(folder)]) == 0
    assert len(re.findall(r"damaged .* is not of this folder: it is the manifest of", capsys.readouterr().out)) == 2
    assert checkpoints_command.main(["verify", str(folder)]) == 1
    assert capsys.readouterr().out.count("WRONG") == 2
    found = submitted(folder, 6, caplog)
    assert found.step == 4
    assert "step-00000009/lineage-000/COMMIT.json is not of this folder" in "\n".join(found.told)
    assert committed(Storage(str(folder)))[-1] == "checkpoints/step-00000004-kept/lineage-000", "not ours to move"
    assert checkpoints_command.main(["prune", str(folder), "--keep-last", "1", "--rejected"]) == 0
    assert (folder / STEP_4 / "COMMIT.json").exists()
    assert list((folder / STEP_4).glob("attempt-*/*.safetensors")), "named by a manifest that was set aside, too"


def test_what_was_set_aside_stays_though_the_step_gets_a_new_checkpoint_that_goes(runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs[0], folder)
    (shard,) = folder.glob(f"{STEP_4}/attempt-*/shard-00000-part-00000.safetensors")
    flip(shard, shard)
    trainer = trainer_of(folder)
    identity = trainer.submission().identity.digest
    resume = find_resume(trainer.run_config, trainer.submission().identity)
    run = Run(folder, CheckpointConfig(every_steps=1, keep_last=1), resume, 2, identity, facts={})
    run.keeper.damaged(STEP_4, "another digest")
    assert "does not verify and is set aside: " in run.next(Said).text
    assert run.commit(4, generation=2) == [4]
    assert run.commit(6, generation=2) == [6], "the second checkpoint of step 4 is gone"
    assert shard.exists()
    assert list(folder.glob(f"{STEP_4}/*-REJECTED.json"))
    assert not (folder / STEP_4 / "COMMIT.json").exists()


def test_the_table_of_the_docs_is_this_one():
    text = (Path(__file__).parents[3] / "docs" / "guarantees.md").read_text()
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in text.splitlines() if line[:1] == "|"]
    assert ("file", *DAMAGES) in rows
    assert [row for row in rows if row[0] in TABLE] == [(file, *cells) for file, cells in TABLE.items()]


def test_a_line_of_the_journal_with_a_wrong_byte_is_found_though_it_is_json(tmp_path):
    with Journal(tmp_path / "j") as journal:
        for number in range(3):
            journal.append({"step": number, "loss": 2.5})
    data = (tmp_path / "j").read_bytes()
    assert [json.loads(line)["step"] for line in data.splitlines()] == [0, 1, 2]
    for at in range(len(data)):
        wrong = bytearray(data)
        wrong[at] ^= 1
        records, damaged = salvage(bytes(wrong))
        right = [record for record in records if set(record) == {"step", "loss"}]
        assert damaged or len(right) < 3 or right == [{"step": n, "loss": 2.5} for n in range(3)]
        assert all(record in [{"step": n, "loss": 2.5} for n in range(3)] for record in right)


def test_a_line_that_rots_while_the_run_goes_on_is_set_aside_by_the_next_submission(runs, tmp_path, caplog):
    folder, path = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    shutil.copytree(runs[0], folder)
    with MetricsLog(folder).open() as log:
        path.write_bytes(path.read_bytes().replace(b'"step":1,"loss":2.0', b'"step":1,"loss":3.0'))
        log.record(step_of(4, 0))
    assert "line 3 of it is damaged" in "\n".join(submitted(folder, 6, caplog).told)
    assert [line["step"] for line in read_metrics(folder)] == [0, 2, 3]


def test_a_new_attempt_goes_back_although_its_terms_begin_again(runs, tmp_path, caplog):
    folder = tmp_path / "run"
    shutil.copytree(runs[0], folder)
    with MetricsLog(folder).open() as log:
        assert log.go_back(3, (5, 2)) == 1
        log.record(step_of(3, 0))
    shutil.rmtree(folder / "terms")
    submitted(folder, 6, caplog)
    (folder / "metrics.index").unlink()
    with MetricsLog(folder).open() as log:
        assert log.go_back(2, (1, 1)) == 2
