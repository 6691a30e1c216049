"""Files of comparisons, which several processes add to and any end may cut off."""

from __future__ import annotations

import json
import queue
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality.quality_clock import check_settings
from benchmarks.quality.records import append, finished


def begin(path: Path, number: int, start: Any, answers: Any) -> None:
    start.wait()
    try:
        check_settings(path, {"number": number})
        answers.put("begun")
    except ValueError as error:
        answers.put("named" if "number" in str(error) else str(error))


def test_of_processes_that_begin_a_file_together_one_does_and_the_others_hear_of_it(tmp_path: Path) -> None:
    """Threads, which have a lock of their own each as processes have."""
    for round_ in range(20):
        start, answers = threading.Barrier(4), queue.Queue[str]()
        threads = [
            threading.Thread(target=begin, args=(tmp_path / f"{round_}.jsonl", number, start, answers))
            for number in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(answers.get() for _ in threads) == ["begun", "named", "named", "named"]
        assert len((tmp_path / f"{round_}.jsonl").read_bytes().splitlines()) == 1


def test_a_line_that_was_cut_off_is_none_and_the_next_takes_its_place(tmp_path: Path) -> None:
    out = tmp_path / "clock.jsonl"
    one, two = ({"part": "clock", "family": name, "seed": 0, "value": {}} for name in ("dense", "random"))
    append(out, one)
    whole = out.read_bytes()
    for cut in (b"{", b'{"part": "clo', json.dumps(two).encode()):
        out.write_bytes(whole + cut)
        assert list(finished(out)) == [("clock", "dense", 0)]
        append(out, two)
        assert out.read_bytes() == whole + json.dumps(two).encode() + b"\n"
    for other in (b"a letter", whole + b"a letter", b"a letter\n"):
        out.write_bytes(other)
        with pytest.raises(ValueError, match="not a file of this job"):
            finished(out)
    out.write_bytes(b"a letter")
    with pytest.raises(ValueError, match="not a file of this job"):
        append(out, two)
    assert out.read_bytes() == b"a letter"
