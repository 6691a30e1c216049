"""The coordinator's keeper of checkpoints, the saver of a worker, and the records in an object store; no Ray."""

from __future__ import annotations

import json
import math
import os
import queue
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_ring.config import CheckpointConfig, RunConfig, Timeouts
from elastic_ring.control.messages import BatchSkip, Checkpoint, CorpusVersion
from elastic_ring.errors import CheckpointDamaged, RunFailed, StorageFailed, TermLost
from elastic_ring.mesh import Mesh
from elastic_ring.monitor.journal import Journal
from elastic_ring.monitor.json_files import json_bytes
from elastic_ring.monitor.metrics import StepMetrics, read_metrics, write_json
from elastic_ring.monitor.metrics_log import MetricsLog
from elastic_ring.runtime import run_storage
from elastic_ring.runtime.coordinator import checkpoints
from elastic_ring.runtime.coordinator import resume as resume_module
from elastic_ring.runtime.coordinator.checkpoints import CheckpointKeeper, Writer
from elastic_ring.runtime.coordinator.inbox import CheckpointCounts, CheckpointFailed, CheckpointsListed, Inbox
from elastic_ring.runtime.coordinator.resume import Resume, find_resume, scan_checkpoints
from elastic_ring.runtime.identity import CONTENTS, VERSION, Identity
from elastic_ring.runtime.notices import CheckpointPart
from elastic_ring.runtime.terms import Terms, TermWatch
from elastic_ring.runtime.worker.saver import CheckpointTerms, Place, Saver, SaveSchedule, open_checkpoint
from elastic_ring.state.checkpoints.retention import KEPT_NAME
from elastic_ring.state.storage import folder as storage_folder
from elastic_ring.state.storage.folder import Storage
from elastic_ring.train.vote import NOTHING, Flag
from tests.journals import journal_bytes
from tests.unit.state.test_checkpoint import same, shard_of

IDENTITY = Identity({"step.seed": "0", VERSION: CONTENTS})
CP, DP = 2, 2


class Run:
    """A run's storage with the savers of its ranks and its keeper; what they tell is handed on as in a run."""

    def __init__(
        self,
        folder: Path | str,
        config: CheckpointConfig,
        resume: Resume | None = None,
        term: int = 1,
        identity: str = IDENTITY.digest,
        ask: Callable[[], None] = lambda: None,
        **more: Any,
    ) -> None:
        """`folder`: of a file system, or s3://BUCKET/FOLDER."""
        self.config = RunConfig("kept", run_dir=str(folder), checkpoint_config=config)
        if not self.config.is_remote:  # a saver writes beside it only
            self.config.folder.mkdir(parents=True, exist_ok=True)
            (self.config.folder / "journal.jsonl").touch()
        self.told: Inbox = queue.Queue()
        writer = Writer(term, identity, **{"facts": {"settings": IDENTITY.entries}, **more})
        self.keeper = CheckpointKeeper(self.config, resume or Resume(), writer, self.told.put, ask)
        self.parts: queue.Queue[Any] = queue.Queue()
        self.savers = [Saver(self.config, self.parts.put) for _ in range(CP * DP)]
        self.keeper.open()
        self.last = self.listed()

    def save(self, step: int, generation: int = 1, *, ranks: int = CP * DP) -> list[CheckpointPart]:
        """The first `ranks` ranks save; returns the parts that they tell of, by rank."""
        for rank in range(ranks):
            shard = shard_of(rank % CP, CP, steps=step)
            shapes = {name: whole for name, whole in full_shapes().items() if name in shard.params}
            self.savers[rank].save(shard, shapes, Place(1, generation, Mesh(DP, CP), rank, "0123456789abcdef", 0))
        parts = [self.parts.get(timeout=60.0) for _ in range(ranks)]
        assert all(saver.wait(60.0) for saver in self.savers)
        return sorted(parts, key=lambda part: (part.dp_rank, part.cp_rank))

    def write(self, step: int, generation: int = 1) -> list[CheckpointPart]:
        """Every rank saves, and the keeper gets the parts."""
        parts = self.save(step, generation)
        for part in parts:
            self.keeper.written(part)
        return parts

    def commit(self, step: int, generation: int = 1) -> list[int]:
        """Every rank saves, the steps are on record, and what is old is removed; the steps that count then."""
        self.write(step, generation)
        self.keeper.look(step)
        assert self.next(CheckpointCounts).checkpoint["step"] == step
        self.listed()
        self.keeper.clean(step)
        return [one.step for one in self.listed()]

    def next(self, kind: type) -> Any:
        """What is told next of this kind; other news before it is dropped."""
        while True:
            found = self.told.get(timeout=60.0)
            if isinstance(found, kind):
                return found

    def listed(self) -> tuple[Checkpoint, ...]:
        """The checkpoints that count, when they are told next."""
        found: tuple[Checkpoint, ...] = self.next(CheckpointsListed).checkpoints
        return found

    def is_silent(self) -> bool:
        """Whether nothing counts that did not count before; asked in the keeper's own order."""
        done = threading.Event()
        self.keeper._jobs.put(done.set)
        assert done.wait(60.0)
        return self.told.empty()


def full_shapes() -> dict[str, tuple[int, ...]]:
    from tests.unit.state.test_checkpoint import whole_values

    return {name: tuple(value.shape) for name, value in whole_values().items()}


def test_parts_that_a_coordinator_took_with_it_are_sent_again_and_count(tmp_path):
    config = CheckpointConfig(every_steps=1, keep_last=2)
    lost = Run(tmp_path, config)
    assert not any(part.is_repeated for part in lost.write(3))
    lost.keeper.abandon()
    run = Run(tmp_path, config, term=2)
    for saver in lost.savers:
        saver.repeat()
    repeated = [lost.parts.get(timeout=60.0) for _ in lost.savers]
    assert all(part.is_repeated for part in repeated)
    for part in repeated:
        run.keeper.written(part)
    run.keeper.look(3)
    assert run.next(CheckpointCounts).checkpoint["step"] == 3
    lost.savers[0].begin(CheckpointTerms("0123456789abcdef", 0, 60.0, wants_first=False), pins=False)
    lost.savers[0].repeat()
    assert lost.parts.empty(), "a new generation repeats no part of an older one"


def test_a_checkpoint_counts_once_every_part_is_written_and_every_step_before_it_is_on_record(tmp_path):
    run = Run(tmp_path, CheckpointConfig(every_steps=1, keep_last=2))
    parts = run.save(3)
    for part in parts[:-1]:
        run.keeper.written(part)
        run.keeper.look(2)
    assert run.is_silent(), "a part is missing"
    run.keeper.written(parts[-1])
    run.keeper.look(1)
    assert run.is_silent(), "step 2 is not on record"
    run.keeper.look(2)
    assert run.next(CheckpointCounts).checkpoint["step"] == 3
    (found,) = run.listed()
    assert found == Checkpoint(3, "checkpoints/step-00000003/lineage-000", Mesh(DP, CP))
    empty = shard_of(1, CP, steps=0)
    open_checkpoint(run.config, found).fill(empty, CP)
    assert same(empty, shard_of(1, CP, steps=3))


def test_old_checkpoints_and_what_never_counted_are_removed(tmp_path):
    run = Run(tmp_path, CheckpointConfig(every_steps=1, keep_last=2, keep_every=4))
    run.save(1, ranks=3)  # a rank dies: this one is never complete
    for step in (2, 3, 4, 5, 6):
        run.commit(step)
    assert run.commit(7) == [4, 6, 7]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        f"step-{step:08d}" for step in (4, 6, 7)
    ]
    run.save(8, ranks=1)
    assert run.keeper.close(60.0)
    assert not (tmp_path / "checkpoints" / "step-00000008").exists(), "the end sweeps what nobody completes"


def test_a_store_that_refuses_to_remove_what_is_left_over_holds_up_no_checkpoint(tmp_path, monkeypatch, caplog):
    run = Run(tmp_path, CheckpointConfig(every_steps=1, keep_last=1))
    run.commit(1)
    refused = []

    def refuse(folder: str = "") -> list[Any]:
        refused.append(folder)
        raise StorageFailed("uploads may not be listed")

    monkeypatch.setattr(run.keeper.stored.storage, "uploads", refuse)
    assert run.commit(2) == [2], "the one before is gone all the same"
    assert len(refused) == 1, "and it is not tried again at once"
    assert "could not be removed: uploads may not be listed" in caplog.text


@pytest.mark.parametrize("goes_back", [False, True])
def test_a_checkpoint_that_counts_only_at_the_end_leaves_no_more_than_retention_keeps(tmp_path, goes_back):
    """The deciding thread tells nobody to clean any more."""
    run = Run(tmp_path, CheckpointConfig(every_steps=1, keep_last=1))
    run.commit(1)
    run.write(2)
    run.keeper.look(2)
    assert run.keeper.close(60.0, prunes=not goes_back)
    left = [2] if not goes_back else [1, 2]
    assert [one.step for one in scan_checkpoints(run.keeper.stored.storage)[0]] == left
    later = Run(
        tmp_path,
        CheckpointConfig(every_steps=1, keep_last=1),
        find_resume(replace(run.config, resume="auto"), IDENTITY),
    )
    assert later.keeper.close(60.0, prunes=True)
    assert [one.step for one in scan_checkpoints(run.keeper.stored.storage)[0]] == left, "it wrote none, so none goes"


def test_parts_and_checkpoints_of_steps_that_were_given_up_do_not_count(tmp_path):
    run = Run(tmp_path, CheckpointConfig(every_steps=1, keep_last=9))
    for step in (2, 4):
        run.commit(step)
    late = run.save(5)
    run.keeper.gone_back(2, (1, 2))
    assert [one.step for one in run.listed()] == [2]
    assert list(tmp_path.glob("checkpoints/step-00000004/lineage-000/*REJECTED.json"))
    for part in late:
        run.keeper.written(part)
    run.keeper.look(9)
    assert run.is_silent()
    assert run.commit(4, generation=2) == [2, 4], "the step that ran again has a new one"


def test_what_was_kept_of_steps_that_were_given_up_is_not_kept_of_the_next_branch(tmp_path):
    run = Run(tmp_path, CheckpointConfig(every_steps=1, keep_last=2))
    run.commit(2)
    run.keeper.keep(4)
    run.commit(4)
    run.keeper.gone_back(2, (1, 2))
    assert [one.step for one in run.listed()] == [2]
    assert run.commit(4, generation=2) == [2, 4]
    assert run.commit(6, generation=2) == [4, 6]
    assert run.commit(8, generation=2) == [6, 8]


def test_a_commit_on_its_way_does_not_count_once_the_run_has_gone_back(tmp_path):
    run = Run(tmp_path, CheckpointConfig(every_steps=1, keep_last=1))
    run.commit(2)
    parts = run.save(4)
    stays = threading.Event()
    run.keeper._jobs.put(lambda: stays.wait(60.0) and None)  # a slow store
    for part in parts:
        run.keeper.written(part)
    run.keeper.look(9)
    run.keeper.gone_back(2, (1, 2))
    stays.set()
    assert [one.step for one in run.listed()] == [2]


def test_a_checkpoint_is_set_aside_only_where_the_keeper_sees_the_damage_too_and_none_left_is_refused(tmp_path):
    run = Run(tmp_path, CheckpointConfig(every_steps=1))
    run.commit(1)
    folder = "checkpoints/step-00000001/lineage-000"
    run.keeper.damaged(folder, "a node without the mount says that it is missing")
    assert [one.step for one in run.listed()] == [1]
    file = next((tmp_path / folder).glob("attempt-*/*.safetensors"))
    file.write_bytes(b"?" + file.read_bytes()[1:])
    run.keeper.damaged(folder, "another digest")
    assert run.listed() == ()
    with pytest.raises(ValueError, match=r"every checkpoint in .* was set aside or is damaged"):
        find_resume(run.config, IDENTITY)


def test_auto_stays_in_the_newest_lineage_also_before_it_has_a_checkpoint(tmp_path):
    config = CheckpointConfig(every_steps=1, keep_last=9)
    run = Run(tmp_path, config)
    run.commit(1)
    run.commit(2)
    Run(tmp_path, config, find_resume(replace(run.config, resume="1"), IDENTITY), term=2)
    found = find_resume(run.config, IDENTITY)
    assert (found.lineage, found.step) == (1, 1)
    Run(tmp_path, config, find_resume(replace(run.config, resume="never"), IDENTITY), term=3)
    found = find_resume(run.config, IDENTITY)
    assert (found.lineage, found.step) == (2, 0)


@pytest.mark.parametrize("is_local", [True, False], ids=["of this run", "of another"])
def test_auto_begins_where_a_lineage_began_that_was_cut_before_its_first_checkpoint(tmp_path, is_local):
    every_1 = CheckpointConfig(every_steps=1, keep_last=9)
    source = Run(tmp_path / "source", every_1)
    source.commit(1)
    source.commit(2)
    folder = tmp_path / ("source" if is_local else "own")
    path = str(tmp_path / "source/checkpoints/step-00000001/lineage-000")
    run = replace(source.config, run_dir=str(folder), resume=path)
    kept = Run(folder, every_1, begun := find_resume(run, IDENTITY), term=2)
    kept.keeper._jobs.put(kept.keeper.stored.post_list)
    assert kept.listed() == begun.checkpoints, "another run's lineage is 0 as this one's"
    found = find_resume(replace(run, resume="auto"), IDENTITY)
    assert (found.step, found.lineage, found.resumed_from) == (1, begun.lineage, begun.resumed_from)
    assert len(found.checkpoints) == 1
    if is_local:  # its own checkpoint is known by its name there: the folder may move
        moved = replace(run, resume="auto", run_dir=str(folder.rename(tmp_path / "moved")))
        assert find_resume(moved, IDENTITY).checkpoints == found.checkpoints
        (tmp_path / "moved").rename(folder)
    (Path(path) / "COMMIT.json").unlink()
    with pytest.raises(ValueError, match=r"step-00000001/lineage-000, at which it began, is not there any more"):
        find_resume(replace(run, resume="auto"), IDENTITY)


def test_a_record_of_a_lineage_opens_no_storage_that_nobody_named(tmp_path, monkeypatch):
    opened: list[str] = []
    real = resume_module.open_or_refuse
    monkeypatch.setattr(resume_module, "open_or_refuse", lambda uri, **how: (opened.append(uri), real(uri, **how))[1])
    run = RunConfig("kept", run_dir=str(tmp_path / "own"))
    record = tmp_path / "own" / "lineages" / "000.json"
    record.parent.mkdir(parents=True)
    checkpoint = "checkpoints/step-00000001/lineage-000"
    for place in ("s3://theirs/runs/r", str(tmp_path / "elsewhere" / "r"), f"{tmp_path}/../r", "r"):
        record.write_bytes(json_bytes({"from": [f"{place}/{checkpoint}"]}))
        with pytest.raises(
            ValueError, match=rf"began at {re.escape(place)}/.* give resume='.*' if you know that place"
        ):
            find_resume(run, IDENTITY)
    for odd in (1, None, "x", "../x", f"{tmp_path}/../{checkpoint}", f"../{checkpoint}", f"{checkpoint}/../../x"):
        record.write_bytes(json_bytes({"from": [odd]}))
        assert "lineages/000.json" in find_resume(run, IDENTITY).damaged, odd
    assert set(opened) == {str(tmp_path / "own")}


@pytest.mark.parametrize("damage", [b"", b"{", b'{"sha256": "another", "format": 1}'])
def test_a_damaged_manifest_is_set_aside_as_a_damaged_file_is(tmp_path, damage):
    every_1 = CheckpointConfig(every_steps=1, keep_last=9)
    run = Run(tmp_path, every_1)
    run.commit(1)
    commits = [tmp_path / f"checkpoints/step-0000000{step}/lineage-000/COMMIT.json" for step in (1, 2)]
    commits[0].write_bytes(damage)
    with pytest.raises(ValueError, match=r"every checkpoint in .* \(1; .*step-00000001/lineage-000/COMMIT.json is no"):
        find_resume(run.config, IDENTITY)
    run.commit(2)
    commits[1].write_bytes(damage)
    again = Run(tmp_path, every_1, term=2)
    assert [path.exists() for path in commits] == [False, False]
    assert len(list(tmp_path.glob("checkpoints/*/lineage-000/*-REJECTED.json"))) == 2
    with pytest.raises(ValueError, match=r"every checkpoint in .* was set aside or is damaged \(2;"):
        find_resume(run.config, IDENTITY)
    assert again.commit(2, generation=2) == [2], "the step that runs again has a new one"


def test_a_part_that_cannot_be_written_is_told_and_the_next_checkpoint_counts(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    run = Run(folder, CheckpointConfig(every_steps=1))
    (folder / "checkpoints").write_text("in the way")
    quick = replace(run.config, timeouts=Timeouts(storage_s=0.1))
    run.savers = [Saver(quick, run.parts.put) for _ in range(CP * DP)]
    for part in run.save(1):
        assert part.error
        run.keeper.written(part)
    assert run.next(CheckpointFailed).step == 1
    assert run.keeper.tries.failing_s > 0.0
    (folder / "checkpoints").unlink()
    run.write(2)
    run.keeper.look(1)
    assert run.next(CheckpointCounts).checkpoint["step"] == 2
    assert run.keeper.tries.failing_s == 0.0


def test_a_commit_that_failed_after_its_manifest_was_there_keeps_its_files(tmp_path, monkeypatch):
    """As where the folder's fsync fails, or an answer is lost: the second try meets the manifest of the first."""
    monkeypatch.setattr(checkpoints, "RETRY_S", 0.5)
    run, tries = Run(tmp_path, CheckpointConfig(every_steps=1, keep_last=9)), []

    def commit(storage: Storage, manifest: Any) -> bool:
        tries.append(made := real(storage, manifest))
        if len(tries) == 1:
            raise StorageFailed("the answer is lost", path="COMMIT.json")
        return made

    real = checkpoints.commit
    monkeypatch.setattr(checkpoints, "commit", commit)
    run.write(1)
    run.keeper.look(1)
    assert run.next(CheckpointCounts).checkpoint["step"] == 1
    assert [one.step for one in run.listed()] == [1]
    assert tries == [True, False]
    found = find_resume(replace(run.config, resume="auto"), IDENTITY)
    assert checkpoints.wrong_with(Storage(str(tmp_path)).open(write=False), found.checkpoints[-1].folder) == []


def test_a_kept_checkpoint_outlives_others_once_it_counts_and_a_step_that_is_saved_again_is_no_failure(tmp_path):
    run = Run(tmp_path, CheckpointConfig(every_steps=1, keep_last=1), attempt="0123456789abcdef")
    run.commit(1)
    run.keeper.keep(1)
    run.keeper.keep(2)  # which never counts: its members die
    run.save(2, ranks=1)
    assert run.commit(3) == [1, 3]
    run.keeper.keep(4)
    assert run.commit(4) == [4]
    assert run.commit(5) == [4, 5]
    for part in run.save(5, generation=2):  # members of a later generation begin there, and save it once more
        run.keeper.written(part)
    run.keeper.look(9)
    assert run.is_silent()
    assert [path.name for path in tmp_path.glob("checkpoints/step-00000005/lineage-000/attempt-*")] == [
        "attempt-01234567-0001-000001"
    ]
    (tmp_path / KEPT_NAME).write_text("{")
    with pytest.raises(CheckpointDamaged, match=r"kept\.json cannot be read .*remove it"):
        checkpoints.prune(run.keeper.stored.storage, 1, 0)


@pytest.mark.slow
def test_a_listing_that_fails_is_no_failed_checkpoint_and_a_commit_that_fails_is_tried_again(
    object_store, proxy, monkeypatch
):
    monkeypatch.setattr(checkpoints, "RETRY_S", 2.0)
    uri = f"s3://{object_store.new_bucket()}/runs/kept"
    run = Run(uri, CheckpointConfig(every_steps=1))
    run.keeper.stored.storage = Storage(uri, timeout_s=0.0)  # one attempt at each request
    refused = threading.Semaphore(0)

    def fault(method: str, path: str) -> str | None:
        if method != failing[0] or failing[1] not in path:
            return None
        refused.release()
        return "503"

    proxy.fault, failing = fault, ("GET", "prefix=runs%2Fkept%2Fcheckpoints%2F&")
    run.keeper._jobs.put(run.keeper.stored.post_list)
    assert all(refused.acquire(timeout=60.0) for _ in range(3))
    assert (run.keeper.tries.failing_s, run.told.empty()) == (0.0, True)
    failing = ("", "")
    assert run.listed() == ()
    failing = ("PUT", "COMMIT.json")
    run.write(1)
    run.keeper.look(1)
    assert run.next(CheckpointFailed).step == 1
    assert run.keeper.tries.failing_s > 0.0
    failing = ("", "")
    assert run.next(CheckpointCounts).checkpoint["step"] == 1
    assert run.keeper.tries.failing_s == 0.0


def test_a_checkpoint_that_is_left_out_is_told_and_the_next_is_asked_for_soon(tmp_path, monkeypatch):
    run = Run(tmp_path, CheckpointConfig(every_steps=1))
    place = Place(1, 1, Mesh(DP, CP), 0, "0123456789abcdef", 0)
    run.savers[1].missed(replace(place, global_rank=1), 4)
    run.savers[0].missed(place, 4)
    assert not run.keeper.tries.take_retry(), "nothing was tried yet"
    run.keeper.written(run.parts.get(timeout=1.0))
    assert run.parts.empty(), "only rank 0 tells"
    assert run.next(CheckpointFailed) == CheckpointFailed(4, "the last one is still being written")
    assert (run.keeper.tries.failing_s > 0.0, run.keeper.tries.take_retry()) == (True, False)
    monkeypatch.setattr(checkpoints, "ASK_AGAIN_S", 0.0)
    assert run.keeper.tries.take_retry()
    run.commit(5)
    assert not run.keeper.tries.take_retry()
    by_time = SaveSchedule(CheckpointConfig(every_s=5.0))
    assert [by_time.is_new_miss() for _ in range(3)] == [True, False, False], (
        "it is due in every step until it is taken"
    )


def test_a_file_that_the_coordinator_does_not_see_whole_keeps_the_checkpoint_from_counting(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "RETRY_S", 0.2)
    run = Run(tmp_path, CheckpointConfig(every_steps=1))
    for step, cut in ((1, lambda file: file.unlink()), (2, lambda file: os.truncate(file, 10))):
        parts = run.save(step)
        cut(tmp_path / parts[1].file.name)
        for part in parts:
            run.keeper.written(part)
        run.keeper.look(step)
        failed = run.next(CheckpointFailed)
        assert parts[1].file.name in failed.reason
        assert "storage_path must be one place for all nodes" in failed.reason
        assert run.is_silent()
    assert not list(tmp_path.glob("checkpoints/*/*/COMMIT.json"))


def test_a_coordinator_that_another_one_has_replaced_commits_nothing(tmp_path):
    lost: list[TermLost] = []

    def ask() -> None:
        if lost:
            raise lost[0]

    run = Run(tmp_path, CheckpointConfig(every_steps=1, keep_last=1), ask=ask)
    run.write(1)
    lost.append(TermLost("another submission has claimed term 2"))
    run.keeper.look(1)
    run.keeper.gone_back(0, (1, 2))
    run.keeper._thread.join(60.0)
    assert run.keeper.close(60.0), "it removes nothing: the files may be the other submission's"
    assert run.told.empty()
    assert not list(tmp_path.glob("checkpoints/*/*/COMMIT.json"))
    assert len(list(tmp_path.glob("checkpoints/step-00000001/lineage-000/*/*"))) == CP * DP


def test_whatever_keeps_a_checkpoint_from_counting_is_told_and_counts_as_failing(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "RETRY_S", 0.0)
    planned = iter([RuntimeError("a defect"), CheckpointDamaged("a manifest is damaged")])

    def inject(step: int) -> None:
        if (error := next(planned, None)) is not None:
            raise error

    run = Run(tmp_path, CheckpointConfig(every_steps=1), inject=inject)
    for step, why in ((1, "a defect"), (2, "a manifest is damaged"), (3, "there is one already, of another writer")):
        if step == 3:
            run.commit(3)
            assert run.keeper.tries.failing_s == 0.0
        run.write(step, generation=2)
        run.keeper.look(step)
        assert why in run.next(CheckpointFailed).reason
        assert run.keeper.tries.failing_s > 0.0


def test_what_a_replaced_submission_commits_late_is_set_aside(tmp_path):
    """It asked for a newer term, was frozen, and wrote its manifest when the other one trained on."""
    config = CheckpointConfig(every_steps=1, keep_last=9)
    old = Run(tmp_path, config, attempt="0123456789abcdef")
    old.commit(1)
    known = find_resume(old.config, IDENTITY)
    new = Run(tmp_path, config, known, term=2, attempt="fedcba9876543210")
    assert [one.step for one in known.checkpoints] == [1]
    old.commit(2)
    new.keeper.damaged("checkpoints/step-00000009/lineage-000", "to have it look")
    assert [one.step for one in new.listed()] == [1]
    (aside,) = tmp_path.glob("checkpoints/step-00000002/lineage-000/*REJECTED.json")
    assert "written under term 1 by a submission that this one, with term 2, has replaced" in aside.read_text()


def test_a_newer_checkpoint_with_a_wrong_byte_does_not_push_out_the_last_that_was_read_whole(tmp_path, monkeypatch):
    def flipped(run: Run, step: int) -> list[int]:
        parts = run.write(step)
        run.keeper.look(step)
        assert run.next(CheckpointCounts).checkpoint["step"] == step
        run.listed()
        file = tmp_path / parts[0].file.name
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        run.keeper.clean(step)
        return [one.step for one in run.listed()]

    only_1 = CheckpointConfig(every_steps=1, keep_last=1)
    run = Run(tmp_path, only_1)
    run.commit(1)
    assert flipped(run, 2) == [1], "it is read before an older one goes, and kept aside"
    monkeypatch.setattr(checkpoints, "READ_BACK_BYTES", 0)
    assert [flipped(run, step) for step in (3, 4)] == [[1, 3], [1, 4]], "too large to be read: the last that was stays"
    resumed = Run(tmp_path, only_1, replace(find_resume(run.config, IDENTITY), excludes=True), term=2)
    assert resumed.keeper.stored._read_back == 4, "members read it whole where they begin"


@pytest.mark.slow
def test_uploads_of_which_no_object_tells_are_aborted(object_store, monkeypatch):
    object_store.enter(monkeypatch)
    bucket, client = object_store.new_bucket(), object_store.client()
    storage = Storage(f"s3://{bucket}/runs/kept").open()

    def begin(attempt: str, step: int) -> None:
        key = f"runs/kept/checkpoints/step-{step:08d}/lineage-000/attempt-{attempt}-0001-000001/shard.safetensors"
        client.create_multipart_upload(Bucket=bucket, Key=key)

    for attempt, step in (("deadbeef", 7), ("01234567", 2), ("01234567", 9)):
        begin(attempt, step)
    for key in ("weights/abc/weights-00001-of-00002.safetensors", "weights.safetensors", "notes"):
        client.create_multipart_upload(Bucket=bucket, Key=f"runs/kept/{key}")
    monkeypatch.setattr(checkpoints, "UNFINISHED_AFTER_S", -60.0)
    run = Run(storage.uri, CheckpointConfig(every_steps=1), attempt="0123456789abcdef")
    steps = [upload.path.split("/")[1] for upload in storage.uploads("checkpoints")]
    assert steps == ["step-00000002", "step-00000009"], "an earlier submission's is gone"
    (path,) = [upload.path for upload in storage.uploads() if not upload.path.startswith("checkpoints/")]
    assert path == "notes", "weights that nobody goes on with are gone"
    run.commit(5)
    assert [upload.path.split("/")[1] for upload in storage.uploads("checkpoints")] == ["step-00000009"]
    assert run.keeper.close(60.0)
    assert storage.uploads("checkpoints") == []


def test_a_store_that_ignores_conditions_is_known_to_the_coordinator_and_each_term_is_claimed_once(
    object_store, proxy, monkeypatch
):
    proxy.fault = lambda method, path: "ignore condition"
    monkeypatch.setattr(storage_folder, "SETTLE_S", 1.0)
    run = RunConfig("kept", run_dir=f"s3://{object_store.new_bucket()}/runs/kept")
    resume = find_resume(run, IDENTITY)
    assert not resume.excludes
    with ThreadPoolExecutor(3) as pool:
        claims = [pool.submit(Terms(run, excludes=resume.excludes).open().claim, "a") for _ in range(3)]
    terms = [claim.result().term for claim in claims if claim.result()]
    assert terms
    assert len(terms) == len(set(terms))
    keeper = CheckpointKeeper(run, resume, Writer(1, IDENTITY.digest), lambda message: None)
    assert not keeper.stored.storage.excludes


def test_a_copy_that_fails_costs_that_checkpoint_and_not_the_step(tmp_path):
    run = Run(tmp_path, CheckpointConfig(every_steps=1))
    shard = shard_of(0, CP, steps=1)
    next(iter(shard.optimizer.state.values()))["kept"] = object()  # no checkpoint can hold it
    shapes = {name: whole for name, whole in full_shapes().items() if name in shard.params}
    run.savers[0].save(shard, shapes, Place(1, 1, Mesh(DP, CP), 0, "0123456789abcdef", 0))
    part = run.parts.get(timeout=60.0)
    assert "which no checkpoint, copy or heal holds" in part.error
    run.keeper.written(part)
    assert run.next(CheckpointFailed).step == 1
    assert run.commit(2) == [2]


def test_a_submission_finds_where_to_begin_and_other_settings_are_named(tmp_path):
    run = Run(tmp_path, CheckpointConfig(every_steps=1, keep_last=9))
    for step in (1, 2):
        run.commit(step)
    found = find_resume(run.config, IDENTITY)
    assert ([one.step for one in found.checkpoints], found.step, found.lineage) == ([1, 2], 2, 0)
    earlier = find_resume(replace(run.config, resume="1"), IDENTITY)
    assert ([one.step for one in earlier.checkpoints], earlier.lineage) == ([1], 1)
    assert find_resume(replace(run.config, resume="never"), IDENTITY) == Resume(1)
    other = replace(run.config, run_dir=str(tmp_path / "other"), resume=str(tmp_path))
    assert find_resume(other, IDENTITY).checkpoints[0].folder.startswith(str(tmp_path))
    with pytest.raises(ValueError, match=r"other settings \(step.seed: 0 there, 1 here\)"):
        find_resume(run.config, Identity({"step.seed": "1", VERSION: CONTENTS}))
    with pytest.raises(ValueError, match="no checkpoint of that step"):
        find_resume(replace(run.config, resume="7"), IDENTITY)
    with pytest.raises(ValueError, match="give auto, never, a step"):
        find_resume(replace(run.config, resume=str(tmp_path / "nothing")), IDENTITY)


# ---------------------------------------------------------------- a corpus that grows


EIGHT, WHOLE = CorpusVersion(2, "x/manifest-000008.json", "8"), CorpusVersion(5, "x/manifest.json", "all")


def journalled(
    folder: Path, *versions: CorpusVersion, resume: Resume | None = None, ran: int = 0, skips: Sequence[BatchSkip] = ()
) -> None:
    """The records of a submission that ordered a build with these versions, and published `ran` steps."""
    lines = [{"note": "term", "term": 1, "num_lines": 0}, {"note": "begin", **(resume or Resume()).journalled()}]
    if versions:
        build = {"type": "Build", "corpus": [vars(version) for version in versions], "skips": list(map(vars, skips))}
        lines.append({"event": {}, "term": 1, "commands": [build]})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "journal.jsonl").write_bytes(journal_bytes(lines) + b'{"torn')
    (folder / "metrics.jsonl").write_bytes(journal_bytes([{"step": k, "loss_hex": "0x1p0"} for k in range(ran)]))


def test_manifests_that_were_taken_after_the_newest_checkpoint_hold_at_the_same_steps_again(tmp_path):
    later = {"corpus": [vars(EIGHT)]}
    run = Run(tmp_path, CheckpointConfig(every_steps=1, keep_last=9), data=lambda: later)
    for step in (2, 3):
        run.commit(step)
    journalled(tmp_path, EIGHT, WHOLE, ran=7)
    found = find_resume(run.config, IDENTITY, grows=True)
    assert (found.step, found.corpus, found.num_steps) == (3, (EIGHT, WHOLE), 7)
    assert find_resume(run.config, IDENTITY).corpus == (EIGHT,), "of the checkpoint alone"
    other = replace(run.config, run_dir=str(tmp_path / "other"), resume=str(tmp_path))
    for elsewhere in (other, replace(run.config, resume="2")):
        chosen = find_resume(elsewhere, IDENTITY, grows=True)
        assert (chosen.corpus, chosen.num_steps) == ((EIGHT, WHOLE), 7)
    begins_anew = find_resume(replace(run.config, resume="never"), IDENTITY, grows=True)
    assert begins_anew == Resume(1)


def test_batches_that_were_left_out_stay_so_also_those_after_the_newest_checkpoint(tmp_path):
    later = {"skips": [vars(BatchSkip(1, 4))]}
    run = Run(tmp_path, CheckpointConfig(every_steps=1, keep_last=9), data=lambda: later)
    run.commit(2)
    acting = replace(run.config, loss_spike="act", loss_spike_actions=("back",), skip_batches=("7+1",))
    assert find_resume(acting, IDENTITY).skips == (BatchSkip(1, 4),), "no records: the checkpoint's word"
    journalled(tmp_path, EIGHT, skips=[BatchSkip(1, 4), BatchSkip(3, 2)])
    assert find_resume(acting, IDENTITY).skips == (BatchSkip(1, 4), BatchSkip(3, 2))
    assert find_resume(replace(acting, resume="never"), IDENTITY).skips == (BatchSkip(7, 1),)
    with pytest.raises(ValueError, match=r"skip_batches=\('7\+1', '7\+2'\): each entry needs a later step"):
        find_resume(replace(acting, resume="never", skip_batches=("7+1", "7+2")), IDENTITY)


def test_what_one_submission_knew_stands_though_the_next_is_cut_before_its_first_build(tmp_path):
    run = Run(tmp_path, CheckpointConfig(every_steps=1, keep_last=9))
    run.commit(1)
    journalled(tmp_path / "attempt-001", WHOLE, ran=7)
    find = lambda: find_resume(run.config, IDENTITY, grows=True)  # noqa: E731
    assert (find().corpus, find().num_steps) == ((WHOLE,), 7), "its own journal is not there yet"
    journalled(tmp_path, resume=find(), ran=1)
    assert (find().corpus, find().num_steps) == ((WHOLE,), 7)
    journalled(tmp_path, resume=replace(find(), lineage=1), ran=3)
    assert find().num_steps == 7, "another lineage's records say nothing"
    (tmp_path / "journal.jsonl").write_text("?\n{}\n")
    assert (find().corpus, find().num_steps) == ((WHOLE,), 7), "what is right of the records before"
    assert f"line 1 of {tmp_path}/journal.jsonl is damaged" in find().damaged["journal.jsonl"]
    journalled(tmp_path, EIGHT)
    assert find().damaged == {}
    for num_lines, damaged in ((3, []), (4, ["journal.jsonl"])):
        write_json(tmp_path / "status.json", {"journal_lines": num_lines})
        assert list(find().damaged) == damaged
    assert "journal.jsonl ends after line 3, and 4 had been written" in find().damaged["journal.jsonl"]


def test_a_run_without_a_checkpoint_begins_at_step_0_with_the_manifests_of_before(tmp_path):
    config = RunConfig("none-yet", run_dir=str(tmp_path), checkpoint_config=CheckpointConfig(every_steps=100))
    journalled(tmp_path, EIGHT, ran=4)
    found = find_resume(config, IDENTITY, grows=True)
    assert found == Resume(0, corpus=(EIGHT,), num_steps=4)


def test_a_rank_that_still_writes_says_so_and_only_rank_0_knows_what_is_due(tmp_path):
    run = RunConfig("due", run_dir=str(tmp_path), checkpoint_config=CheckpointConfig(every_steps=5))
    saver = Saver(run, lambda part: None)
    assert [saver.flags(applied, 20, 0) for applied in (4, 5, 10)] == [NOTHING, Flag.DUE, Flag.DUE]
    assert saver.flags(5, 20, 1) == NOTHING
    stays = threading.Event()
    saver._thread = threading.Thread(target=stays.wait, daemon=True)
    saver._thread.start()
    assert (saver.flags(5, 20, 0), saver.flags(5, 20, 1)) == (Flag.BUSY | Flag.DUE, Flag.BUSY)
    stays.set()


def test_the_interval_follows_cost_and_failures_within_bounds_where_nobody_sets_it():
    schedule = SaveSchedule(CheckpointConfig())
    assert not schedule.is_due(5, 10)
    schedule.saved(0.5)
    assert schedule.interval_s == pytest.approx(293.4, abs=0.5)
    schedule.mean_time_between_failures_s = 60.0
    assert schedule.interval_s == 30.0
    assert "a failure is expected every 60 s: the next checkpoint in 30 s" in schedule.news()
    assert schedule.news() == "", "said once"
    assert SaveSchedule(CheckpointConfig(every_s=9.0)).news() == "", "it is set"
    assert not SaveSchedule(CheckpointConfig(every_steps=0)).is_due(100, 100)
    for wrote_s, is_due in ((math.inf, False), (3.5, False), (2.5, True)):
        schedule.wrote_s = wrote_s
        assert schedule.is_due(10, 10) == is_due, "the last step is saved where that is quick"


def test_the_first_checkpoint_comes_after_step_1_where_nobody_sets_the_interval(tmp_path):
    terms = CheckpointTerms("attempt", 0, 86_400.0, True)
    parts: list[Any] = []
    saver = Saver(RunConfig("first", run_dir=str(tmp_path)), parts.append)
    saver.begin(terms, pins=False)
    assert (saver.flags(1, 20, 0), saver.flags(1, 20, 1)) == (Flag.DUE, NOTHING)
    saver.schedule.saved(0.01)
    assert saver.flags(2, 20, 0) == NOTHING, "the next one in its time"
    saver.begin(replace(terms, wants_first=False), pins=False)
    assert saver.flags(3, 20, 0) == NOTHING, "a later generation: there is one"
    saver.begin(terms, pins=True)
    assert (saver.flags(1, 20, 0), saver.flags(1, 20, 1)) == (Flag.BUSY, Flag.BUSY), "training does not wait for memory"
    place = Place(1, 1, Mesh(1, 1), 0, "attempt", 0)
    saver.missed(place, 1)
    assert parts == [], "nothing is late"
    for config in (CheckpointConfig(every_steps=5), CheckpointConfig(every_s=9.0), CheckpointConfig(every_steps=0)):
        asked = Saver(RunConfig("asked", run_dir=str(tmp_path), checkpoint_config=config), parts.append)
        asked.begin(terms, pins=True)
        assert asked.flags(1, 20, 0) == NOTHING, config


# ---------------------------------------------------------------- metrics of steps that run again


def step(number: int, loss: float) -> StepMetrics:
    return StepMetrics(number, loss, 1.0, 0.1, 8, 8.0, 1.0, False, 1, Mesh(1, 1), 1)


def test_a_step_that_runs_again_is_recorded_once_if_its_loss_is_equal_else_with_both_values(tmp_path):
    with MetricsLog(tmp_path) as metrics:
        for number in range(4):
            metrics.record(step(number, float(number)))
        assert metrics.go_back(2, (1, 2)) == 2
        assert metrics.go_back(2, (1, 2)) == 0, "a build goes back once"
        assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1]
        metrics.record(step(2, 2.0))
    with MetricsLog(tmp_path) as metrics:  # another coordinator goes on
        assert metrics.last_step == 2
        metrics.record(step(3, 3.5))
        assert metrics.table.losses_hex() == [loss.hex() for loss in (0.0, 1.0, 2.0, 3.5)]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["step"] == 2 and "loss_hex" in line for line in lines) == 1
    assert [line["replaces_loss_hex"] for line in lines if "replaces_loss_hex" in line] == [(3.0).hex()]
    assert [line["loss"] for line in read_metrics(tmp_path)] == [0.0, 1.0, 2.0, 3.5]


def test_a_gap_that_was_lost_with_its_writer_is_told_once_and_holds_nothing_up(tmp_path):
    with MetricsLog(tmp_path) as metrics:
        metrics.record(step(0, 1.0))
        gaps = [metrics.begin_at(5), metrics.begin_at(5)]
        assert re.sub(r".*/", "", gaps[0]).startswith("metrics.jsonl has no lines for steps 1 to 4: they were lost")
        assert gaps[1:] == [""]
        assert metrics.last_step == 4
    with MetricsLog(tmp_path) as metrics:
        assert metrics.last_step == 4
        metrics.record(step(5, 2.0))
        assert metrics.table.losses_hex() == [(1.0).hex(), (2.0).hex()]
        metrics.record(step(9, 3.0))
        with pytest.raises(RunFailed, match="no line for step 6"):
            metrics.table.losses_hex()
    assert (tmp_path / "metrics.jsonl").read_text().count("begins") == 1


# ---------------------------------------------------------------- records in an object store


def test_records_come_back_from_the_store_alone_and_a_later_term_wins(object_store, tmp_path, monkeypatch):
    object_store.enter(monkeypatch, TMPDIR=str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(run_storage, "PIECE_BYTES", 40)
    run = RunConfig("mirrored", storage_path=f"s3://{object_store.new_bucket()}/runs")
    terms = Terms(run).open()
    before, own = terms.claim("a"), terms.claim("b")
    assert [before.term, own.term] == [1, 2]
    first, second = run_storage.Mirror(run, 1), run_storage.Mirror(run, 2)
    run.folder.mkdir(parents=True)
    first.open()
    with Journal(run.folder / "journal.jsonl") as journal:
        for number in range(5):
            journal.append({"line": number})
            first.flush()
        (run.folder / "status.json").write_text('{"phase": "running"}')
        first.flush()
        fresh = tmp_path / "elsewhere"
        run_storage.fetch(run, fresh)
        assert (fresh / "journal.jsonl").read_bytes() == (run.folder / "journal.jsonl").read_bytes()
        assert json.loads((fresh / "status.json").read_text())["phase"] == "running"
        second.flush()
        journal.append({"line": "of a replaced coordinator"})
        first.flush()
    run_storage.fetch(run, fresh)
    assert b"replaced" not in (fresh / "journal.jsonl").read_bytes()
    longer = (fresh / "journal.jsonl").read_bytes() + b'{"line": "not mirrored yet"}\n'
    (fresh / "journal.jsonl").write_bytes(longer)
    run_storage.fetch(run, fresh, keep_longer=True)
    assert (fresh / "journal.jsonl").read_bytes() == longer
    first.close(10.0)
    watch, storage = TermWatch(run, own, terms), Storage(run.storage_uri)
    watch.look()
    storage.remove("terms/000002")  # by a lifecycle rule
    with pytest.raises(TermLost, match=r"its claim terms/000002 .* was removed"):
        watch.look()
    storage.remove_folder("records")
    storage.remove("journal.jsonl")
    with pytest.raises(StorageFailed, match="neither this run's journal nor its term"):
        TermWatch(run, own, terms).look()


def test_the_manifests_of_a_run_come_from_its_records_in_the_store(object_store, tmp_path, monkeypatch):
    object_store.enter(monkeypatch, TMPDIR=str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    run = RunConfig("growing", storage_path=f"s3://{object_store.new_bucket()}/runs")
    journalled(run.folder, WHOLE, ran=6)
    run_storage.Mirror(run, 1).flush()  # the cluster is gone after that
    found = find_resume(run, IDENTITY, grows=True)
    assert (found.corpus, found.num_steps) == ((WHOLE,), 6)


def test_a_store_that_does_not_answer_is_told_and_ends_nothing(object_store, tmp_path, monkeypatch):
    gateway = object_store.another_gateway()
    gateway.enter(monkeypatch, TMPDIR=str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    run = RunConfig("lagging", storage_path=f"s3://{gateway.new_bucket()}/runs", timeouts=Timeouts(storage_s=4.0))
    run.folder.mkdir(parents=True)
    mirror = run_storage.Mirror(run, 1)
    mirror.open()
    gateway.kill()
    (run.folder / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(StorageFailed):
        mirror.flush()
    gateway.start()
    mirror.close(10.0)
    run_storage.fetch(run, tmp_path / "fetched")
    assert (tmp_path / "fetched" / "metrics.jsonl").read_text() == '{"step": 0}\n'
