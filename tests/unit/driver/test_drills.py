"""What drills make and judge by themselves: a corpus whose bad steps are known, and what counts as a false alarm."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import pytest

from deploy.drills import alert
from deploy.drills.healthy import Findings, notes_of
from deploy.drills.planted import FIRST_CALM_STEPS, SENTENCE, poisoned
from elastic_ring.data.sampling.order import Order
from elastic_ring.data.text import TextFiles
from elastic_ring.monitor.journal import Journal


def test_the_poisoned_steps_of_a_corpus_get_noise_and_no_other_step_does(tmp_path):
    settings = poisoned(tmp_path, lambda: SENTENCE * 256, num_steps=400)
    named = dict(zip(settings[::2], settings[1::2], strict=True))
    context, batch = int(named["--context"]), int(named["--global-batch"])
    source = TextFiles(context, (named["--data"],)).open()
    assert source.num_sequences == 400 * batch
    order = Order(int(named["--seed"]), batch, source.num_sequences)
    text = (SENTENCE * context)[:context].encode()
    bad = {
        step
        for step in range(399)
        if any(bytes(source.read(i).tokens[:context].tolist()) != text for i in order.sample_ids(step))
    }
    first = FIRST_CALM_STEPS
    assert bad == {*range(first, first + first // 2), *range(3 * first, min(399, 3 * first + int(0.75 * first)))}


@pytest.mark.parametrize(
    ("fired", "notes", "num_rules", "is_alarm"),
    [
        ([], {}, 30, False),
        (["ElasticRingNoSpares {}"], {}, 30, True),
        ([], {"straggler": 1}, 30, True),
        ([], {}, 0, True),
    ],
)
def test_a_run_is_healthy_when_rules_were_judged_and_nothing_was_found(fired, notes, num_rules, is_alarm):
    found = Findings(num_rules, fired, Counter(notes))
    assert found.is_alarm is is_alarm
    assert found.told(7, 1.0, False).endswith("FALSE ALARM" if is_alarm else "silent")


def test_findings_are_read_from_the_journal(tmp_path):
    with Journal(tmp_path / "journal.jsonl") as journal:
        for line in (
            {"note": "begin"},
            {"note": "spike", "step": 3},
            {"now": 1.0, "event": {"type": "Tick"}},
            {"note": "spike", "step": 9},
            {"note": "checkpoint"},
        ):
            journal.append(line)
    assert notes_of(tmp_path / "journal.jsonl") == {"spike": 2}


def test_a_drill_names_a_ray_that_serves_no_metrics(monkeypatch):
    monkeypatch.setattr(alert.shutil, "which", lambda program: program)
    monkeypatch.setitem(sys.modules, "ray.dashboard.optional_deps", None)
    options = argparse.Namespace(rules=Path(__file__).parents[3] / "deploy" / "monitoring" / "rules.yml")
    with pytest.raises(ValueError, match=r"Ray serves no metrics here .*pip install 'ray\[default\]'"):
        alert.fires(next(iter(alert.DRILLS)), options)
