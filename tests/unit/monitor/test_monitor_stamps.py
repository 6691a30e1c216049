"""A stamp is read back whole, across processes, while it is written and after its writer has died."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_ring.errors import ElasticRingError
from elastic_ring.monitor import stamps
from elastic_ring.monitor.stamps import Phase, StampReader, StampWriter, phase_name


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "stamps" / "w-1"


@pytest.fixture
def writer(path: Path) -> Iterator[StampWriter]:
    with StampWriter(path) as opened:
        yield opened


def test_a_stamp_is_read_back_with_who_wrote_it(path: Path, writer: StampWriter) -> None:
    reader = StampReader(path)
    first = reader.read()
    assert first is not None
    assert (first.pid, first.tid) == (os.getpid(), threading.get_native_id())
    assert (first.counter, first.step, first.phase) == (1, -1, Phase.STARTING)
    writer.generation = 7
    writer.stamp(21, Phase.BACKWARD, hop=3)
    writer.touch()
    last = reader.read()
    assert last is not None
    assert (last.counter, last.step, last.generation, last.phase, last.hop) == (3, 21, 7, Phase.BACKWARD, 3)
    assert last.monotonic_ns >= first.monotonic_ns
    assert last.whole
    reader.close()


def test_a_worker_that_has_not_begun_has_no_stamp(path: Path) -> None:
    StampWriter(path)
    reader = StampReader(path)
    assert reader.read() is None
    assert not path.parent.exists()
    with StampWriter(path):
        assert reader.read() is not None
    reader.close()


def test_touches_of_another_thread_count_and_disturb_no_stamp(path: Path, writer: StampWriter) -> None:
    num_touches = 50_000

    def touch() -> None:
        for _ in range(num_touches):
            writer.touch()

    heart = threading.Thread(target=touch)
    heart.start()
    reader = StampReader(path)
    for n in range(2000):
        writer.generation = n
        writer.stamp(n, Phase.FORWARD, n)
        stamp = reader.read()
        assert stamp is not None
        assert (stamp.whole, stamp.step, stamp.generation, stamp.hop) == (True, n, n, n)
    heart.join()
    last = reader.read()
    assert last is not None
    assert last.counter == 1 + 2000 + num_touches


def test_the_thread_that_binds_is_the_one_that_is_watched(path: Path, writer: StampWriter) -> None:
    thread = threading.Thread(target=writer.bind_thread)
    thread.start()
    thread.join()
    stamp = StampReader(path).read()
    assert stamp is not None
    assert stamp.tid not in (0, threading.get_native_id())


def test_the_last_stamp_of_a_dead_writer_stays_readable(path: Path) -> None:
    script = (
        "import os, sys\nfrom elastic_ring.monitor.stamps import StampWriter\n"
        "writer = StampWriter(sys.argv[1]).open()\nwriter.stamp(5, 4)\nos.kill(os.getpid(), 9)\n"
    )
    dead = subprocess.run([sys.executable, "-c", script, path], check=False)
    assert dead.returncode == -9
    stamp = StampReader(path).read()
    assert stamp is not None
    assert (stamp.step, stamp.phase, stamp.whole) == (5, Phase.REDUCE, True)


def test_a_file_that_is_no_stamp_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"x" * 128, b"x" * 500):
        stranger = tmp_path / "stranger"
        stranger.write_bytes(content)
        with pytest.raises(ElasticRingError, match="no progress stamp"):
            StampReader(stranger).read()


def test_a_reading_taken_during_a_stamp_says_so(path: Path, writer: StampWriter) -> None:
    """A writer that was stopped between body and counter, made by writing all but the counter."""
    writer.stamp(8, Phase.FORWARD)
    writer._words[stamps._BEGUN_SLOT] = 4
    stamps._BODY.pack_into(writer._words, stamps._BODY_AT, 9, 0, Phase.VOTE, -1, 0)
    stamp = StampReader(path).read()
    assert stamp is not None
    assert (stamp.whole, stamp.counter, stamp.pid) == (False, 2, os.getpid())


def test_readings_of_a_racing_writer_are_one_stamp_each(path: Path) -> None:
    """The writer keeps step = hop = generation; a mixture of two stamps would break that."""
    script = (
        "import sys\nfrom elastic_ring.monitor.stamps import StampWriter\n"
        "writer = StampWriter(sys.argv[1]).open()\n"
        "for n in range(300_000):\n    writer.generation = n\n    writer.stamp(n, 2, n)\n"
        "print('done', flush=True)\nsys.stdin.readline()\n"
    )
    racing = subprocess.Popen(
        [sys.executable, "-c", script, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    reader = StampReader(path)
    num_read, last_counter = 0, 0
    while True:
        stamp = reader.read()
        if stamp is None:
            assert racing.poll() is None
            continue
        assert stamp.counter >= last_counter
        last_counter = stamp.counter
        if stamp.whole and stamp.counter > 1:
            num_read += 1
            assert stamp.step == stamp.hop == stamp.generation == stamp.counter - 2
        if last_counter == 300_001:
            break
    racing.communicate("\n")
    assert racing.returncode == 0
    assert num_read > 0


def test_a_step_that_is_left_has_a_clock_of_its_phases(path: Path, writer: StampWriter) -> None:
    reader, times = StampReader(path), iter(range(0, 10**12, 10**9))
    first = reader.read()
    assert first is not None
    assert first.clock is None
    writer._now_ns = lambda: next(times)
    writer._since_ns = 0
    writer.stamp(4, Phase.IDLE)
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD, Phase.REDUCE, Phase.VOTE, Phase.APPLY):
        writer.stamp(4, phase)
    writer.waited_for_data(0.25)
    within = reader.read()
    assert within is not None
    assert within.clock is None  # of the start there is none
    writer.stamp(5, Phase.IDLE)
    for _ in range(2):  # it stays until the next step ends
        stamp = reader.read()
        assert stamp is not None
        assert stamp.clock is not None
        assert (stamp.clock.step, stamp.clock.data_wait_s) == (4, 0.25)
        spent = {phase: s for phase, s in stamp.clock.phases_s.items() if s}
        assert spent == {"idle": 1.0, "forward": 1.0, "backward": 2.0, "reduce": 1.0, "vote": 1.0, "apply": 1.0}
        writer.stamp(5, Phase.FORWARD)


def test_closing_removes_the_file_unless_it_is_still_wanted(path: Path) -> None:
    StampWriter(path).open().close(unlink=False)
    assert path.exists()
    writer = StampWriter(path).open()
    writer.close()
    writer.close()
    assert list(path.parent.iterdir()) == []


def test_phases_have_the_names_that_faults_use() -> None:
    for name in ("forward", "backward", "reduce", "vote", "apply", "idle", "heal"):
        assert phase_name(Phase[name.upper()]) == name
    assert phase_name(77) == "phase 77"
