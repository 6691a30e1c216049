"""A node's GPUs as files that all its processes share: who holds which one and for which place, which have failed.

A hold is a lock on a small file, which the kernel lets go of the moment its process dies, however it dies: a standby
process takes over the GPU of a dead one without asking anybody. Files are named by what names the chip itself, so that
processes which see different GPUs, or count them differently, mean the same one. No torch and no CUDA may enter: the
node's agent reads these files too.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastic_ring.errors import PeerFailed

log = logging.getLogger(__name__)

FOLDER = Path("/dev/shm/elastic_ring-gpus")
"""One for all runs and users of a host."""
LOOK_S = 0.005
PATIENCE_S = 1.0
"""So long a newcomer waits for the GPU of its place before it takes one that was another place's."""
QUIET_S = 0.1
NUM_STRIKES, STRIKE_S = 2, 3600.0
"""A GPU is bad when so many processes have failed on it within this time; then it gets another chance."""


@dataclass(frozen=True)
class Chip:
    """`index`: among the GPUs that this process sees. `name`: the same in every process of the host."""

    index: int
    name: str


@dataclass(frozen=True)
class Holder:
    """Who holds a GPU, or held it last: a process (pid 0: it has given the GPU back) and the place in the mesh of
    `run` that it computed for. `started`: in the kernel's ticks, because PIDs come again."""

    pid: int = 0
    started: int = 0
    run: str = ""
    place: int = -1


@dataclass(frozen=True)
class Strike:
    """A process found that a GPU does not compute."""

    pid: int
    started: int
    unix_s: float
    why: str


# ------------------------------------------------------------ decisions, from what was read


def verdict(strikes: Iterable[Strike], now_unix_s: float) -> str:
    """`good`, `doubtful` (the process may have been to blame) or `bad` (another one failed there too)."""
    failed = {(s.pid, s.started) for s in strikes if abs(now_unix_s - s.unix_s) < STRIKE_S}
    return "bad" if len(failed) >= NUM_STRIKES else "doubtful" if failed else "good"


def order_of(
    chips: Sequence[Chip], held: Mapping[str, Holder], verdicts: Mapping[str, str], run: str, place: int,
    waited_s: float,
) -> list[Chip]:
    """The GPUs that a newcomer to `place` tries now, in this order.

    The one that this place was computed on comes first, and alone for PATIENCE_S: so places keep their GPUs when two
    members of a node die at once, and sums over three or more ranks keep the order that NCCL has put the GPUs in.
    A doubtful one comes last, a bad one never.
    """

    def mine(chip: Chip) -> bool:
        record = held.get(chip.name, Holder())
        return (record.run, record.place) == (run, place)

    def anothers(chip: Chip) -> bool:
        record = held.get(chip.name, Holder())
        return record.run == run and record.place not in (-1, place)

    patient = waited_s < PATIENCE_S
    good = [chip for chip in chips if verdicts.get(chip.name, "good") == "good"]
    doubtful = [chip for chip in chips if verdicts.get(chip.name, "good") == "doubtful"]
    own = [chip for chip in good if mine(chip)]
    if own and patient:
        return own
    order = own + [chip for chip in good if not mine(chip) and not anothers(chip)]
    if not patient:
        order += [chip for chip in good if anothers(chip)]
    return order + [chip for chip in doubtful if mine(chip) or not patient]


def wait_for_memory(
    free_bytes: Callable[[], int], need_bytes: int, is_there: Callable[[], bool], check: Callable[[], None],
    timeout_s: float,
) -> int:
    """Wait until `need_bytes` are free, or whoever held them has ended and no more gets free; what is free then.

    The lock of a process that dies is free long before its memory is. Raises what `check` raises between two looks.
    """
    begun = changed = time.monotonic()
    free = most = free_bytes()
    ended = False
    while free < need_bytes and time.monotonic() - begun < timeout_s:
        if not ended and not is_there():
            ended, changed = True, time.monotonic()
        if ended and time.monotonic() - changed > QUIET_S:
            break
        check()
        time.sleep(LOOK_S)
        free = free_bytes()
        if free > most:
            most, changed = free, time.monotonic()
    return free


# ------------------------------------------------------------ the files


def shared_folder(path: Path) -> Path:
    """A folder in which every user of the host may make files and nobody removes another's, as in /tmp."""
    with suppress(FileExistsError):
        path.mkdir(parents=True)
    about = path.stat()
    if about.st_uid == os.getuid() and about.st_mode & 0o7777 != 0o1777:
        path.chmod(0o1777)  # mkdir's own mode is cut by the umask
    return path


def open_shared(path: Path, flags: int = 0) -> int:
    """A file that every user may lock and write, made if need be. Returns its descriptor.

    Not opened with O_CREAT where it is there: in a folder such as /tmp the kernel refuses that for the file of another
    user (fs.protected_regular). Raises PermissionError where whoever made it kept it for himself.
    """
    flags |= os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        with suppress(FileNotFoundError):
            return os.open(path, flags)
        try:
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            continue
        os.fchmod(fd, 0o666)
        return fd


def lock_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.lock"


def mark_path(folder: Path, name: str) -> Path:
    """The strikes against a GPU; an operator who knows better removes it."""
    return folder / f"{name}.bad"


def last_holder(folder: Path, name: str) -> Holder:
    """What the lock file says; an empty record where it says nothing that can be read."""
    try:
        found = json.loads(lock_path(folder, name).read_text())
        return Holder(int(found["pid"]), int(found["started"]), str(found["run"]), int(found["place"]))
    except (OSError, ValueError, TypeError, KeyError):  # not there, torn, or not ours
        return Holder()


def strikes_of(folder: Path, name: str) -> list[Strike]:
    """As far as they can be read: the node's agent must not stumble over what any user may have written."""
    found = []
    with suppress(OSError):
        for line in mark_path(folder, name).read_text(errors="replace").splitlines():
            with suppress(ValueError, TypeError, KeyError):
                one = json.loads(line)
                when, why = float(one["unix_s"]), str(one["why"])
                found.append(Strike(int(one["pid"]), int(one["started"]), when, why))
    return found


def verdicts_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    now = time.time()
    return {name: verdict(strikes_of(folder, name), now) for name in names}


def bad_ones(folder: Path, names: Iterable[str]) -> list[str]:
    """Those of these GPUs that are not to be used."""
    return sorted(name for name, found in verdicts_of(folder, names).items() if found == "bad")


def process_started(pid: int) -> int | None:
    """When a process began, in ticks since boot; None when it is gone. It is there as long as any of its threads may
    still have files, and with them a GPU's memory, open."""
    try:
        stat = _stat(Path(f"/proc/{pid}/stat"))
        if stat[0] in "ZX" and not any(_stat(task / "stat")[0] not in "ZX" for task in _tasks(pid)):
            return None
        return int(stat[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _stat(path: Path) -> list[str]:
    """The fields from the process's state on; its name before them may hold anything."""
    return path.read_text(errors="replace").rpartition(")")[2].split()


def _tasks(pid: int) -> list[Path]:
    return [task for task in Path(f"/proc/{pid}/task").iterdir() if task.name != str(pid)]


def lock_owner(path: Path, locks: str) -> int | None:
    """The PID that holds the lock on `path` by the text of /proc/locks; None for none that can be seen from here."""
    try:
        about = path.stat()
    except FileNotFoundError:
        return None
    wanted = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
    for line in locks.splitlines():
        words = line.split()
        if len(words) > 5 and words[1] == "FLOCK" and words[5] == wanted and int(words[4]) > 0:
            return int(words[4])
    return None


def describe(folder: Path, chips: Sequence[Chip]) -> str:
    """Why each of these is not to be had, one after another."""
    locks, verdicts = Path("/proc/locks").read_text(), verdicts_of(folder, [chip.name for chip in chips])
    said = []
    for chip in chips:
        path, record = lock_path(folder, chip.name), last_holder(folder, chip.name)
        pid = lock_owner(path, locks)
        if verdicts[chip.name] == "bad":
            told = strikes_of(folder, chip.name)[-1].why
            said.append(f"GPU {chip.index} failed ({told}; {mark_path(folder, chip.name)})")
        elif pid is not None:
            who = f", rank {record.place} of run {record.run}" if record.pid == pid and record.run else ""
            said.append(f"GPU {chip.index} is held by pid {pid}{who} ({path})")
        else:
            said.append(f"GPU {chip.index} is held by nobody that can be seen from here ({path})")
    return "; ".join(said)


class Claim:
    """One process's hold on one GPU. Nothing is asked of the chip itself."""

    def __init__(self, run: str, folder: Path = FOLDER) -> None:
        self._run, self.folder = run, folder
        self._fd: int | None = None
        self.chip: Chip | None = None
        self.before = Holder()  # who held it until now

    def seize(self, chips: Sequence[Chip], place: int, timeout_s: float, check: Callable[[], None]) -> Chip:
        """The GPU held, or the first of `order_of` that is free. Raises PeerFailed when none gets free in time, naming
        who holds them, and whatever `check` raises between two looks."""
        begun, names = time.monotonic(), [chip.name for chip in chips]
        while self.chip is None:
            waited_s = time.monotonic() - begun
            held = {name: last_holder(self.folder, name) for name in names}
            for chip in order_of(chips, held, verdicts_of(self.folder, names), self._run, place, waited_s):
                if self.lock(chip):
                    break
            else:
                if waited_s > timeout_s:
                    told = describe(self.folder, chips)
                    raise PeerFailed(f"none of {len(chips)} GPUs got free within {timeout_s:.0f} s: {told}")
                check()
                time.sleep(LOOK_S)
        self._record(Holder(os.getpid(), process_started(os.getpid()) or 0, self._run, place))
        return self.chip

    def lock(self, chip: Chip) -> bool:
        """Take it if it is free."""
        path = lock_path(shared_folder(self.folder), chip.name)
        fd = open_shared(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            same = os.fstat(fd).st_ino == path.stat().st_ino  # else it was removed, and others lock a new one
        except (BlockingIOError, FileNotFoundError):
            same = False
        if not same:
            os.close(fd)
            return False
        self._fd, self.chip, self.before = fd, chip, last_holder(self.folder, chip.name)
        return True

    def give_back(self) -> None:
        """Let it go; that it was this place's is remembered."""
        if self._fd is not None:
            record = last_holder(self.folder, self.chip.name) if self.chip is not None else Holder()
            self._record(Holder(run=record.run, place=record.place))
        self.release()

    def release(self) -> None:
        """Let it go with the record as it is."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd, self.chip = None, None

    @property
    def predecessor_is_there(self) -> bool:
        """Whether the process that held this GPU before has not quite ended."""
        return self.before.pid > 0 and process_started(self.before.pid) == self.before.started

    def _record(self, holder: Holder) -> None:
        assert self._fd is not None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(asdict(holder)).encode(), 0)


def strike(folder: Path, chip: Chip, why: str) -> str:
    """Write down that this process failed on `chip`, which it holds; the verdict from now on."""
    pid, first_line = os.getpid(), (why.splitlines() or [""])[0][:300]
    entry: dict[str, Any] = asdict(Strike(pid, process_started(pid) or 0, time.time(), first_line))
    fd = open_shared(mark_path(shared_folder(folder), chip.name), os.O_APPEND)
    os.write(fd, f"{json.dumps(entry)}\n".encode())
    os.close(fd)
    found = verdicts_of(folder, [chip.name])[chip.name]
    log.error("GPU %d (%s) is %s now: %s", chip.index, chip.name, found, why)
    return found


def is_free(folder: Path, chip: Chip) -> bool:
    """Whether no process has claimed it just now."""
    claim = Claim("", folder)
    if not claim.lock(chip):
        return False
    claim.release()
    return True


def strike_if_free(folder: Path, chip: Chip, why: str) -> bool:
    """The same for a GPU that this process does not hold. While another one computes on it, failing there proves
    nothing of the chip: it may be one process's alone (compute mode EXCLUSIVE_PROCESS)."""
    claim = Claim("", folder)
    if not claim.lock(chip):
        return False
    strike(folder, chip, why)
    claim.release()
    return True
