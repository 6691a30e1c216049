"""Who holds a GPU and which are not to be used: real files, real locks and real processes, and no GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_ring.errors import GroupAborted, PeerFailed
from elastic_ring.runtime.gpu import leases
from elastic_ring.runtime.gpu.leases import (
    FAILURE_WINDOW_S,
    PATIENCE_S,
    Gpu,
    GpuFailure,
    GpuLease,
    Owner,
    bad_ones,
    failure_record_path,
    failures_of,
    last_owner,
    lock_owner,
    lock_path,
    open_shared,
    order_of,
    process_started,
    record_failure,
    record_failure_if_free,
    shared_folder,
    verdict,
    verdicts_of,
    wait_for_memory,
)
from tests.unit.gpu_leases.lease_owners import FOUR, fail_elsewhere, go_on, owner_process

A, B, C, D = FOUR


def acquire(lease: GpuLease, place: int, seen: tuple[Gpu, ...] = FOUR) -> Gpu:
    return lease.acquire(seen, place, 0.0, go_on)


# ------------------------------------------------------------ holding


def test_a_gpu_has_one_owner_and_gets_free_when_it_is_given_back(tmp_path):
    first, second = GpuLease("run", tmp_path), GpuLease("run", tmp_path)
    assert first.lock(A)
    assert not second.lock(A)
    assert second.lock(B)
    first.give_back()
    assert GpuLease("run", tmp_path).lock(A)


def test_the_gpu_of_a_killed_process_is_free_at_once(tmp_path):
    with owner_process(tmp_path, A, 3) as process:
        lease = GpuLease("run", tmp_path)
        assert not lease.lock(A)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert lease.lock(A)
        assert (lease.previous_owner.pid, lease.previous_owner.run, lease.previous_owner.place) == (
            process.pid,
            "run",
            3,
        )


def test_processes_that_count_their_gpus_differently_mean_the_same_one(tmp_path):
    """One sees all four, the other was started with the last two of them."""
    assert GpuLease("run", tmp_path).lock(D)
    other = GpuLease("other", tmp_path)
    assert acquire(other, 0, (Gpu(0, C.name), Gpu(1, D.name))) == Gpu(0, C.name)
    with pytest.raises(PeerFailed):
        acquire(GpuLease("other", tmp_path), 1, (Gpu(0, C.name), Gpu(1, D.name)))


def test_a_lock_file_that_was_removed_gives_no_second_owner_of_the_old_one(tmp_path, monkeypatch):
    path, opened = lock_path(tmp_path, A.name), leases.open_shared

    def open_and_lose(path: Path) -> int:
        fd = opened(path)
        path.unlink()
        return fd

    monkeypatch.setattr(leases, "open_shared", open_and_lose)
    assert not GpuLease("run", tmp_path).lock(A)
    monkeypatch.undo()
    assert GpuLease("run", tmp_path).lock(A)
    assert path.exists()


def test_files_are_for_all_users_whatever_the_umask(tmp_path):
    before = os.umask(0o077)
    try:
        folder = shared_folder(tmp_path / "gpus")
        lease = GpuLease("run", folder)
        acquire(lease, 0)
        record_failure(folder, A, "it broke")
        (folder / "old").mkdir()
        shared_folder(folder / "old")
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o7777 == 0o1777
    assert (folder / "old").stat().st_mode & 0o7777 == 0o1777
    assert lock_path(folder, A.name).stat().st_mode & 0o7777 == 0o666
    assert failure_record_path(folder, A.name).stat().st_mode & 0o7777 == 0o644, "read by all, written by one"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_in_which_others_may_remove_files_is_refused(tmp_path):
    folder = tmp_path / "gpus"
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    folder.chmod(0o777)
    with pytest.raises(NotADirectoryError, match="belongs to user 65534, and everybody may remove files in it"):
        shared_folder(folder)
    folder.chmod(0o1777)
    assert shared_folder(folder) == folder


AS_NOBODY = """
import os, sys
from pathlib import Path
from elastic_ring.runtime.gpu.leases import Gpu, GpuLease
os.setgid(65534), os.setuid(65534)
print(GpuLease("run", Path(sys.argv[1])).lock(Gpu(0, sys.argv[2])))
"""


FAILS_AS_NOBODY = """
import os, sys
from pathlib import Path
from elastic_ring.runtime.gpu.leases import Gpu, record_failure, verdicts_of
os.setgid(65534), os.setuid(65534)
folder, mine, roots = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
record_failure(folder, Gpu(0, mine), "it broke", is_proven=True)
print(verdicts_of(folder, [mine, roots]))
"""


@pytest.fixture
def folder_for_all() -> Iterator[Path]:
    """Not in pytest's own temporary folder, which it closes to other users."""
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o755)
        yield shared_folder(Path(parent, "gpus"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_failures_count_that_root_or_the_same_user_has_recorded(folder_for_all):
    folder = folder_for_all
    record_failure(folder, B, "it broke", is_proven=True)
    command = [sys.executable, "-c", FAILS_AS_NOBODY, str(folder), A.name, B.name]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == str({A.name: "bad", B.name: "bad"}), done.stderr
    assert verdicts_of(folder, [A.name, B.name]) == {A.name: "good", B.name: "bad"}
    line = json.dumps({"pid": 1, "started": 1, "unix_s": 1e9, "why": "no", "is_proven": True})
    of_root = failure_record_path(folder, A.name, 0)
    of_root.write_text(line)
    of_root.chmod(0o666)  # anybody may have written this
    assert verdicts_of(folder, [A.name]) == {A.name: "good"}
    of_root.chmod(0o644)
    os.chown(of_root, 65534, 65534)
    assert verdicts_of(folder, [A.name]) == {A.name: "good"}


PLANTED: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "folder": Path.mkdir,
    "link": lambda path: path.symlink_to(path.parent / "precious"),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("plant", PLANTED.values(), ids=list(PLANTED))
def test_what_is_no_file_in_a_records_place_is_none_and_nobody_waits_for_it(tmp_path, plant):
    (tmp_path / "precious").write_text("kept")
    for path in (lock_path(tmp_path, A.name), failure_record_path(tmp_path, A.name)):
        plant(path)
    assert last_owner(tmp_path, A.name) == Owner()
    assert failures_of(tmp_path, A.name) == []
    assert record_failure(tmp_path, A, "not kept") == "good"
    assert not GpuLease("run", tmp_path).lock(A)
    with pytest.raises(PeerFailed, match=rf"cannot be locked: {lock_path(tmp_path, A.name)} is no file"):
        GpuLease("run", tmp_path).acquire((A,), 0, 0.0, lambda: None)
    assert acquire(GpuLease("run", tmp_path), 0, (B,)) == B
    assert (tmp_path / "precious").read_text() == "kept"


def test_a_link_in_the_place_of_the_folder_is_refused_and_its_target_keeps_its_mode(tmp_path):
    (tmp_path / "home").mkdir(mode=0o700)
    (tmp_path / "gpus").symlink_to(tmp_path / "home")
    with pytest.raises(NotADirectoryError, match="somebody has put it there"):
        shared_folder(tmp_path / "gpus")
    assert (tmp_path / "home").stat().st_mode & 0o7777 == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_locks_the_same_files(folder_for_all):
    folder = folder_for_all
    lease = GpuLease("run", folder)
    acquire(lease, 0)
    lease.give_back()
    acquire(lease, 0, (B,))
    for gpu, told in ((A, "True"), (B, "False"), (C, "True")):
        done = subprocess.run([sys.executable, "-c", AS_NOBODY, str(folder), gpu.name], capture_output=True, text=True)
        assert done.stdout.strip() == told, done.stderr


def test_a_file_that_is_there_is_not_opened_as_a_new_one(tmp_path, monkeypatch):
    """Where fs.protected_regular is set the kernel refuses that for another user's file in such a folder."""
    os.close(open_shared(tmp_path / "lock"))
    asked, opened = list[int](), os.open

    def open_(path: Path, flags: int, mode: int = 0o777) -> int:
        asked.append(flags)
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", open_)
    os.close(open_shared(tmp_path / "lock"))
    assert [flags & os.O_CREAT for flags in asked] == [0]


# ------------------------------------------------------------ which one


def held(**by_letter: Owner) -> dict[str, Owner]:
    return {f"GPU-{letter}": record for letter, record in by_letter.items()}


def of(place: int, run: str = "run") -> Owner:
    return Owner(run=run, place=place)


def test_a_place_takes_its_own_gpu_and_waits_for_it_before_it_takes_anothers():
    records = held(a=of(0), b=of(1), c=of(2), d=of(1, "another run"))
    assert order_of(FOUR, records, {}, "run", 2, 0.0) == [C]
    assert order_of(FOUR, records, {}, "run", 2, PATIENCE_S) == [C, D, A, B]


def test_a_place_without_a_gpu_of_its_own_leaves_the_others_theirs_for_a_while():
    records = held(a=of(0), b=of(1))
    assert order_of(FOUR, records, {}, "run", 3, 0.0) == [C, D]
    assert order_of(FOUR, records, {}, "run", 3, PATIENCE_S) == [C, D, A, B]
    assert order_of(FOUR, {}, {}, "run", 3, 0.0) == list(FOUR)


def test_a_bad_gpu_is_never_taken_and_a_doubtful_one_last():
    records = held(a=of(0), b=of(1))
    assert order_of(FOUR, records, {B.name: "bad"}, "run", 1, 0.0) == [C, D]
    assert order_of(FOUR, records, {B.name: "doubtful"}, "run", 1, 0.0) == [C, D, B], "without waiting for it"
    assert order_of(FOUR, records, {C.name: "doubtful"}, "run", 3, 0.0) == [D]
    assert order_of(FOUR, records, {C.name: "doubtful"}, "run", 3, PATIENCE_S) == [D, A, B, C]
    assert order_of((A,), records, {A.name: "bad"}, "run", 0, 60.0) == []


def test_two_newcomers_at_once_get_the_gpus_of_their_places(tmp_path):
    with owner_process(tmp_path, A, 0), owner_process(tmp_path, B, 1) as one, owner_process(tmp_path, C, 2) as two:
        one.kill(), one.wait()
        waiting, go = GpuLease("run", tmp_path), threading.Event()
        taken: list[Gpu] = []

        def newcomer() -> None:
            taken.append(waiting.acquire(FOUR[:3], 2, 60.0, go.set))

        thread = threading.Thread(target=newcomer)
        thread.start()
        assert go.wait(60), "the GPU of place 2 is not free yet, and that of place 1 is left alone"
        two.kill(), two.wait()
        thread.join()
        assert taken == [C]
        assert acquire(GpuLease("run", tmp_path), 1, FOUR[:3]) == B


def test_who_sits_elsewhere_now_keeps_its_gpu_under_its_new_place(tmp_path):
    lease = GpuLease("run", tmp_path)
    assert acquire(lease, 2) == A
    assert acquire(lease, 0) == A
    assert last_owner(tmp_path, A.name) == Owner(os.getpid(), process_started(os.getpid()) or 0, "run", 0)
    lease.give_back()
    assert last_owner(tmp_path, A.name) == Owner(0, 0, "run", 0), "the place comes back to it"


def test_waiting_ends_with_what_the_check_raises(tmp_path):
    assert GpuLease("run", tmp_path).lock(A)

    def aborted() -> None:
        raise GroupAborted("given up")

    with pytest.raises(GroupAborted):
        GpuLease("run", tmp_path).acquire((A,), 0, 60.0, aborted)


def test_a_refusal_names_who_holds_each_gpu_and_the_files(tmp_path):
    for _ in range(2):
        fail_elsewhere(tmp_path, B, "fell off the bus")
    with owner_process(tmp_path, A, 3) as process, pytest.raises(PeerFailed) as refused:
        acquire(GpuLease("other", tmp_path), 0, (A, B))
    told = str(refused.value)
    assert f"GPU 0 is owned by pid {process.pid}, rank 3 of run run ({lock_path(tmp_path, A.name)})" in told
    assert f"GPU 1 failed (fell off the bus; {tmp_path}/{B.name}.*.bad)" in told


def test_the_owner_of_a_lock_is_read_from_the_kernels_table(tmp_path):
    path = lock_path(tmp_path, A.name)
    assert lock_owner(path, "") is None
    acquire(GpuLease("run", tmp_path), 0)
    about = path.stat()
    where = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
    rows = [f"1: FLOCK  ADVISORY  WRITE 77 {where} 0 EOF", f"2: POSIX  ADVISORY  WRITE 78 {where}1 0 EOF"]
    assert lock_owner(path, "\n".join(rows)) == 77
    assert lock_owner(path, rows[0].replace("77", "-1")) is None, "a process that cannot be seen from here"
    assert lock_owner(path, f"1: -> {rows[1]}") is None


STRANGE = '{"pid": "x", "started": [], "unix_s": "y", "why": 1, "run": 2, "place": 3}'


ENDLESS = '{"pid": 1e999, "started": 1e999, "unix_s": 1e999, "why": "", "run": "", "place": 1e999}'


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "7", '{"pid": 1}', STRANGE, ENDLESS, "\udcff", "[" * 50_000, "x" * (1 << 20)]
)
def test_a_record_that_cannot_be_read_is_none(tmp_path, text):
    lock_path(tmp_path, A.name).write_bytes(text.encode(errors="surrogateescape"))
    failure_record_path(tmp_path, A.name).write_bytes(text.encode(errors="surrogateescape"))
    assert last_owner(tmp_path, A.name) == Owner()
    assert failures_of(tmp_path, A.name) == []
    assert acquire(GpuLease("run", tmp_path), 0) == A


# ------------------------------------------------------------ which not


def test_a_gpu_on_which_two_processes_failed_within_the_time_is_bad():
    now = 1e9
    one, same, two = (GpuFailure(pid, 1, now - 10, "why") for pid in (1, 1, 2))
    assert verdict([], now) == "good"
    assert verdict([one, same], now) == "doubtful", "one process may be to blame itself"
    assert verdict([one, two], now) == "bad"
    assert verdict([one, GpuFailure(1, 2, now, "why")], now) == "bad", "the same number, another process"
    assert verdict([one, two], now + FAILURE_WINDOW_S) == "good", "another chance"
    assert verdict([one, GpuFailure(2, 1, now - FAILURE_WINDOW_S, "why")], now) == "doubtful"
    proven = GpuFailure(1, 1, now - 10, "why", is_proven=True)
    assert verdict([proven], now) == "bad", "a wrong result that others showed needs no second opinion"
    assert verdict([proven], now + 2 * FAILURE_WINDOW_S) == "bad", "and no time mends it"


def test_failures_of_real_processes_make_a_gpu_bad_until_its_mark_is_removed(tmp_path):
    fail_elsewhere(tmp_path, A, "first line\nsecond")
    assert verdicts_of(tmp_path, [A.name, B.name]) == {A.name: "doubtful", B.name: "good"}
    lease = GpuLease("run", tmp_path)
    assert acquire(lease, 0, (A,)) == A, "a second opinion"
    assert [record_failure(tmp_path, A, "again") for _ in range(2)] == ["bad", "bad"]
    lease.give_back()
    assert [s.why for s in failures_of(tmp_path, A.name)] == ["first line", "again", "again"]
    assert bad_ones(tmp_path, [B.name, A.name]) == [A.name]
    assert acquire(lease, 0) == B
    failure_record_path(tmp_path, A.name).unlink()
    assert bad_ones(tmp_path, [A.name]) == []


def test_a_mark_that_may_not_be_read_is_none(tmp_path):
    failure_record_path(tmp_path, A.name).mkdir()
    lock_path(tmp_path, B.name).mkdir()
    assert bad_ones(tmp_path, [A.name]) == []
    assert last_owner(tmp_path, B.name) == Owner()


def test_a_gpu_that_another_process_computes_on_is_not_recorded_as_failed(tmp_path):
    with owner_process(tmp_path, A, 0):
        assert not record_failure_if_free(tmp_path, A, "busy or unavailable")
    assert verdicts_of(tmp_path, [A.name]) == {A.name: "good"}
    before = last_owner(tmp_path, A.name)
    assert record_failure_if_free(tmp_path, A, "no longer there")
    assert verdicts_of(tmp_path, [A.name]) == {A.name: "doubtful"}
    assert last_owner(tmp_path, A.name) == before, "who had it is still known"
    assert GpuLease("run", tmp_path).lock(A)


def test_a_record_is_plain_json(tmp_path):
    acquire(GpuLease("run", tmp_path), 5)
    assert json.loads(lock_path(tmp_path, A.name).read_text())["place"] == 5


# ------------------------------------------------------------ memory of the process before


class Memory:
    """Readings of free memory, one after another, the last for ever; `then` happens with the reading before it."""

    def __init__(self, *readings: int, then: Callable[[], None] = go_on) -> None:
        self.readings, self.then, self.num_read = list(readings), then, 0

    def __call__(self) -> int:
        self.num_read += 1
        if len(self.readings) == 1:
            return self.readings[0]
        if len(self.readings) == 2:
            self.then()
        return self.readings.pop(0)


def test_where_enough_is_free_nobody_is_waited_for():
    memory = Memory(8)
    assert wait_for_memory(memory, 8, lambda: True, go_on, 60.0) == 8
    assert memory.num_read == 1


def test_memory_is_waited_for_while_the_process_before_is_there():
    assert wait_for_memory(Memory(1, 1, 3, 9), 8, lambda: True, go_on, 60.0) == 9


def test_once_the_process_before_has_ended_and_no_more_gets_free_it_goes_on():
    there = [True]
    memory = Memory(1, 2, 3, then=there.clear)
    assert wait_for_memory(memory, 8, lambda: bool(there), go_on, 60.0) == 3
    assert memory.num_read > 3


def test_the_wait_for_memory_is_bounded_and_an_abort_ends_it():
    assert wait_for_memory(Memory(1), 8, lambda: True, go_on, 0.05) == 1

    def aborted() -> None:
        raise GroupAborted("given up")

    with pytest.raises(GroupAborted):
        wait_for_memory(Memory(1), 8, lambda: True, aborted, 60.0)


def test_a_previous_owner_is_there_until_its_last_thread_has_ended(tmp_path):
    with owner_process(tmp_path, A, 0) as process:
        lease = GpuLease("run", tmp_path)
        os.kill(process.pid, signal.SIGKILL)
        while not lease.lock(A):
            pass
        while lease.previous_owner_is_alive():  # its lock is released first; nobody has waited for the process yet
            pass
        assert Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    assert process_started(os.getpid()) is not None
    lease.previous_owner = Owner(os.getpid(), (process_started(os.getpid()) or 0) - 1)
    assert not lease.previous_owner_is_alive(), "another process with the same number"
    lease.previous_owner = Owner(os.getpid(), process_started(os.getpid()) or 0)
    assert lease.previous_owner_is_alive()


LEADERLESS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
print("up", flush=True)
ctypes.CDLL(None).syscall(60, 0)  # exit of this thread alone, on x86-64
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of a system call")
def test_a_process_whose_first_thread_has_ended_before_the_others_is_there():
    with subprocess.Popen([sys.executable, "-c", LEADERLESS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "up"
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            pass
        assert process_started(process.pid) is not None
        process.kill()
        while process_started(process.pid) is not None:
            pass
