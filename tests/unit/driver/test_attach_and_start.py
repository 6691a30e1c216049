"""How a run ended, read from its folder by a driver that came late; and a start that is refused at the call itself."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elastic_ring import ElasticRingTrainer
from elastic_ring.config import RunConfig, ScalingConfig, StepConfig
from elastic_ring.control.messages import CorpusVersion
from elastic_ring.data.prepared import Later, PreparedTokens
from elastic_ring.data.source import order_of
from elastic_ring.errors import CrashLoop, StorageFailed, UserCodeFailed
from elastic_ring.model.config import preset
from elastic_ring.model.transformer import Transformer
from elastic_ring.monitor.journal import journal_bytes
from elastic_ring.monitor.metrics import STATUS_NAME, SUMMARY_NAME, write_json
from elastic_ring.runtime.coordinator.dispatch import Dispatcher
from elastic_ring.runtime.coordinator.run_spec import RunSpec
from elastic_ring.runtime.driver import follow
from elastic_ring.runtime.driver.attach import end_on_record
from tests.unit.data.corpora import prepared, texts, write_jsonl


def test_an_end_is_believed_of_the_attempt_that_was_followed_only(tmp_path: Path) -> None:
    run = RunConfig("late", run_dir=str(tmp_path))
    assert end_on_record(run, "a") is None
    write_json(tmp_path / STATUS_NAME, {"ended": False, "end": {}})
    assert end_on_record(run, "a") is None, "a coordinator that died on the way has ended nothing"
    end = {"error": "ShardLost", "message": "no holder of cp_rank 1", "facts": {"cp_rank": "1"}, "attempt": "a"}
    write_json(tmp_path / STATUS_NAME, {"ended": True, "end": end})
    assert end_on_record(run, "a") == end
    assert end_on_record(run, "b") is None, "an earlier attempt's end is not this one's"
    write_json(tmp_path / SUMMARY_NAME, {"steps": 3})
    found = end_on_record(run, "b")
    assert found is not None
    assert (found["error"], found["summary"]) == ("", {"steps": 3})


def grown_run(folder: Path) -> tuple[ElasticRingTrainer, CorpusVersion]:
    """A trainer on the beginning of a corpus, and the version by which it grows at step 5."""
    manifest = prepared(folder / "out", write_jsonl(folder / "a.jsonl", texts(300)))
    data = PreparedTokens.of(str(folder / "out" / "manifest-000004.json"), 96)
    run, step = RunConfig("loop", run_dir=str(folder / "run")), StepConfig(steps=8, global_batch=6, context_tokens=96)
    trainer = ElasticRingTrainer(partial(Transformer, preset("laptop")), data, run_config=run, step_config=step)
    return trainer, CorpusVersion(5, str(folder / "out" / "manifest.json"), manifest.digest)


def test_a_crash_loop_and_a_mistake_of_the_users_name_the_batch_by_the_manifest_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, version = grown_run(tmp_path)
    data: Any = trainer.task.data
    result_of = follow.Follower(trainer.submission(), ()).result
    order = order_of(replace(data, later=(Later(*asdict(version).values()),)).open(), 0, 6)
    corpus = json.dumps([asdict(version)])
    for step, of in ((4, str(data)), (6, f"{version.uri} (which holds from step 5 on)")):
        facts = {"step": str(step), "corpus": corpus}
        with pytest.raises(CrashLoop) as caught:
            result_of({"error": "CrashLoop", "message": "3 times", "facts": facts})
        ids = order.sample_ids(step)
        named = ", ".join(map(str, ids))
        assert caught.value.facts == {"step": str(step), "samples": ids}
        assert caught.value.message == f"3 times\nThe batch of that step is sequences {named} of {of}"
    assert max(ids) >= data.open().num_sequences, "else the first manifest would name them as well"
    mistake = {"error": "UserCodeFailed", "message": "Traceback", "facts": {"step": "6", "corpus": corpus}}
    with pytest.raises(UserCodeFailed, match=f"^Traceback\nThe batch of that step is sequences {named} of "):
        result_of(mistake)
    Path(version.uri).unlink()
    loop = {"error": "CrashLoop", "message": "3 times"}
    with pytest.raises(CrashLoop, match=r"The batch of that step cannot be named: .*manifest\.json: cannot be read"):
        result_of({**loop, "facts": {"step": "6", "corpus": corpus}})

    def away(task: Any) -> Any:
        raise StorageFailed("the store is away")

    monkeypatch.setattr(follow, "training_order", away)
    with pytest.raises(CrashLoop, match="The batch of that step cannot be named: the store is away"):
        result_of({**loop, "facts": {"step": "6", "corpus": corpus}})


def test_a_submission_whose_later_manifest_is_gone_is_refused_before_anything_starts(tmp_path: Path) -> None:
    trainer, version = grown_run(tmp_path)
    begin = {"note": "begin", "lineage": 0, "corpus": [asdict(version)], "num_steps": 6}
    trainer.run_config.folder.mkdir()
    (trainer.run_config.folder / "journal.jsonl").write_bytes(journal_bytes([begin]))
    found = trainer.submission().find_resume()
    assert (found.corpus, found.num_steps) == ((version,), 6)
    Path(version.uri).unlink()
    with pytest.raises(ValueError, match=r"manifest\.json: cannot be read"):
        trainer.submission().find_resume()
    (trainer.run_config.folder / "journal.jsonl").write_text("?\n{}\n")
    assert "journal.jsonl is damaged: which sequences" in trainer.submission().find_resume().damaged["journal.jsonl"]


class Refusing:
    """What the dispatcher calls to start a worker, when the call itself raises."""

    def start_worker(self, *arguments: Any) -> None:
        raise ValueError("resources must not contain the key 'memory'")


def test_a_start_that_is_refused_at_the_call_is_told_with_its_reason() -> None:
    told: list[Any] = []
    run_spec = RunSpec(RunConfig("refused", run_dir="nowhere"), ScalingConfig(), None, "a", "", 0.0, "")  # type: ignore[arg-type]
    cluster: Any = Refusing()
    dispatch = Dispatcher(run_spec, "", cluster, None, None, told.append)
    dispatch._start_on("w3", None)
    (lost,) = [happened.event for happened in told]
    assert (lost.worker, lost.reason) == ("w3", "start-failed")
    assert "must not contain the key 'memory'" in lost.detail
