"""Where closing a ring of GPUs spends its time: detection, abort, rebuild, healing link.

    python benchmarks/probes/probe_close_gpu.py --variants default,no-cumem

Plain processes and the product's `Connector`, no Ray and no training: mesh 2 x 2 on four GPUs (1 x 2 on two) and a
standby process that takes the place of the last rank, which is killed in the middle of an exchange with `--hold-gib` of
its GPU's memory in hand. How long a process takes to end, and whoever builds groups meanwhile, depends on where it has
contexts. `--contexts`: members have one on their `own` GPU, on `all`, as workers of the product that were standbys, or
had them on all and have `released` the others once the first generation was connected, as the product does with
`ScalingConfig(release_contexts=True)`. With `--at-once` groups are built while the killed process ends, as the product
does. A variant is a setting of NCCL's environment. Prints one JSON line for each measurement.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import os
import select
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

if __name__ in ("__main__", "__mp_main__"):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.distributed import HashStore, PrefixStore, TCPStore

from benchmarks.harness.arguments import bench_parser
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.gpu.cuda_contexts import CudaContexts, end_contexts, unused_others
from elastic_ring.runtime.groups.groups import Connector, Groups, Rendezvous, forget_groups, nccl

MESHES = {2: Mesh(1, 2), 4: Mesh(2, 2)}  # by the host's GPUs
VARIANTS: dict[str, dict[str, str]] = {
    "default": {},
    "no-cumem": {"NCCL_CUMEM_ENABLE": "0"},
    "connect": {"NCCL_RUNTIME_CONNECT": "0"},
    "no-cumem-connect": {"NCCL_CUMEM_ENABLE": "0", "NCCL_RUNTIME_CONNECT": "0"},
    "few-channels": {"NCCL_CUMEM_ENABLE": "0", "NCCL_RUNTIME_CONNECT": "0", "NCCL_MAX_NCHANNELS": "8"},
}
CONTEXTS = ("own", "all", "released")
PF_EXITING = 0x4
DEATH_S, LOOK_S = 20.0, 0.0005
BUFFER_BYTES = 1 << 30
WARM_UP_S = 60.0


class Process:
    """One child process: its main thread trains, a second thread aborts groups."""

    def __init__(self, index: int, end: Connection, lock: str, contexts: str, mesh: Mesh, warm: str) -> None:
        self.index, self.end, self.lock, self.mesh = index, end, lock, mesh
        standby = index == mesh.size
        # Only members that were spares have warmed up NCCL.
        self.warm = warm if standby else "none" if contexts == "own" or warm == "none" else "one"
        self.all_contexts = contexts != "own" or standby
        self.connector: Connector | None = None
        self.groups: Groups | None = None
        self.buffers: Any = None
        self.stopped = threading.Event()
        self.device = torch.device("cuda", index - 1 if standby else index)

    def serve(self) -> None:
        begun = time.monotonic()
        for index in range(torch.cuda.device_count()) if self.all_contexts else [self.device.index]:
            torch.ones(64, 64, device=torch.device("cuda", index)).sum().item()
        self._warm_nccl()
        torch.cuda.set_device(self.device)
        self.end.send({"what": "warm", "s": time.monotonic() - begun})
        while True:
            name, arguments = self.end.recv()
            try:
                self.end.send(getattr(self, name)(*arguments))
            except BaseException as error:
                self.end.send({"what": name, "error": f"{type(error).__name__}: {error}"[:300]})

    def _warm_nccl(self) -> None:
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        if self.warm == "one":
            for device in devices:
                warm_nccl_between([device])
        elif self.warm == "all":
            warm_nccl_between(devices)

    def connect(self, port: int, prefix: str, rank: int) -> dict[str, Any]:
        begun = time.monotonic()
        self.groups = None
        forget_groups()
        if self.connector is not None:
            self.connector.close()
        freed = time.monotonic()
        where = Rendezvous("127.0.0.1", port, prefix, "127.0.0.1", 60.0, 600.0)
        self.connector = Connector(where, self.device)
        self.groups = self.connector.connect(self.mesh, rank)
        return {
            "what": "connect",
            "rank": rank,
            "free_s": freed - begun,
            **self.connector.timings,
            "total_s": time.monotonic() - begun,
        }

    def release(self) -> dict[str, Any]:
        contexts, begun = CudaContexts(), time.monotonic()
        before = contexts.having()
        num_released = end_contexts(unused_others(self.device, contexts), contexts)
        return {
            "what": "release",
            "process": self.index,
            "s": time.monotonic() - begun,
            "num_released": num_released,
            "contexts_before": before,
            "contexts_after": CudaContexts().having(),
        }

    def hold(self, gib: int) -> dict[str, Any]:
        fd = os.open(self.lock, os.O_RDWR | os.O_CREAT)
        fcntl.flock(fd, fcntl.LOCK_EX)
        self.buffers = [torch.ones(BUFFER_BYTES, dtype=torch.uint8, device=self.device) for _ in range(gib)]
        torch.cuda.synchronize()
        return {"what": "hold", "gib": gib}

    def exchange(self) -> dict[str, Any]:
        """Exchange until one fails; the second thread aborts when the driver creates a signal file."""
        assert self.groups is not None
        assert self.connector is not None
        groups, connector = self.groups, self.connector
        self.stopped.clear()
        watcher = threading.Thread(target=self._abort_on_word, args=(connector,), daemon=True)
        watcher.start()
        x, why = torch.ones(16 << 20, device=self.device), ""
        try:
            while True:
                for group in (groups.shard, groups.replica):
                    if group.size() > 1:
                        group.allreduce([x]).wait()
                x.fill_(1.0)
                torch.cuda.synchronize()
                groups.check()
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"[:200]
        stopped_at = time.monotonic()
        self.stopped.set()
        watcher.join()
        return {
            "what": "abort",
            "stopped_s": stopped_at - self.asked_at,
            "why": why,
            "probe_ok": nccl.probe(self.device),
        }

    def _abort_on_word(self, connector: Connector) -> None:
        while not os.path.exists(self.lock + ".abort"):
            time.sleep(0.001)
        self.asked_at = time.monotonic()
        connector.abort_until(self.stopped, 30.0)

    def heal(self, role: int, gib: int) -> dict[str, Any]:
        assert self.connector is not None
        x = torch.full((gib << 30,), role, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize()
        begun = time.monotonic()
        link = self.connector.link("probe", ("donor", "newcomer"), ("donor", "newcomer")[role])
        linked = time.monotonic()
        rates = []
        for _ in range(4):
            start = time.monotonic()
            link.device._start_coalescing()
            for piece in x.split(64 << 20):
                link.device.send([piece], 1, 0) if role == 0 else link.device.recv([piece], 0, 0)
            link.device._end_coalescing().wait()
            torch.cuda.synchronize()
            rates.append(x.numel() / (time.monotonic() - start) / 1e9)
        ok = role == 0 or int(x[::4096].sum()) == 0
        self.connector.retire(link)
        return {
            "what": "heal",
            "role": role,
            "link_s": linked - begun,
            "GB_per_s": [round(r, 1) for r in rates],
            "ok": ok,
        }

    def memory(self) -> dict[str, Any]:
        free, total = torch.cuda.mem_get_info(self.device)
        return {"what": "memory", "used_gib": (total - free) / 2**30, "torch_gib": torch.cuda.memory_reserved() / 2**30}


def warm_nccl_between(devices: Sequence[torch.device]) -> None:
    """Build a group of these GPUs within this process, send one element if there are several, and destroy it."""
    store = HashStore()

    def build(rank: int) -> Any:
        prefixed = PrefixStore("warmup", store)
        backend = nccl.create_backend(prefixed, rank, len(devices), devices[rank], WARM_UP_S)
        nccl.connect_now(backend, devices[rank], lambda: False)
        nccl.first_exchange(backend, devices[rank])
        return backend

    backends = nccl.Builds([partial(build, rank) for rank in range(len(devices))]).results(lambda: None)
    nccl.Builds([partial(nccl.end, backend) for backend in backends]).results(lambda: None)


def child(index: int, end: Connection, lock: str, contexts: str, mesh: Mesh, warm: str) -> None:
    import logging

    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s [{index}] %(message)s")
    Process(index, end, lock, contexts, mesh, warm).serve()


def tell(ends: dict[int, Connection], calls: dict[int, tuple[Any, ...]], timeout_s: float = 90.0) -> dict[int, Any]:
    for index, (name, *arguments) in calls.items():
        ends[index].send((name, arguments))
    return {index: ends[index].recv() if ends[index].poll(timeout_s) else {"error": "no answer"} for index in calls}


class Death:
    """A process that is killed, and when each sign of its end appears, in seconds after the SIGKILL."""

    def __init__(self, pid: int, lock: str) -> None:
        self._pid, self._lock = pid, lock
        self._pidfd = os.pidfd_open(pid)
        self.first_sign = threading.Event()
        self._seen: dict[str, float] = {}
        self._begun = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def signs(self) -> dict[str, float]:
        """All signs seen, once the process has ended."""
        self._thread.join()
        return self._seen

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        while len(self._seen) < 3 and time.monotonic() - self._begun < DEATH_S:
            now = time.monotonic() - self._begun
            if "exiting_s" not in self._seen and self._is_exiting():
                self._seen["exiting_s"] = now
            if "lock_free_s" not in self._seen and self._lock_is_free():
                self._seen["lock_free_s"] = now
            if "pidfd_s" not in self._seen and poller.poll(0):
                self._seen["pidfd_s"] = now
            if self._seen:
                self.first_sign.set()
                time.sleep(LOOK_S)  # other processes build groups meanwhile
        self.first_sign.set()

    def _is_exiting(self) -> bool:
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return bool(int(fields[6]) & PF_EXITING)

    def _lock_is_free(self) -> bool:
        fd = os.open(self._lock, os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        return True


@dataclass(frozen=True)
class Asked:
    """One measurement: a mesh, a variant of NCCL's environment, and where members have contexts."""

    variant: str
    contexts: str
    mesh: Mesh
    hold_gib: int
    at_once: bool
    warm: str

    def show(self, row: Any) -> None:
        print(json.dumps({"variant": self.variant, "contexts": self.contexts, **row}, default=str), flush=True)


def measure(asked: Asked) -> None:
    os.environ.update({**nccl.ENVIRONMENT, **VARIANTS[asked.variant]})
    context, mesh = multiprocessing.get_context("spawn"), asked.mesh
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        lock, ends, processes = f"{folder}/lock", {}, {}
        for index in range(mesh.size + 1):
            ends[index], theirs = context.Pipe()
            arguments = (index, theirs, lock, asked.contexts, mesh, asked.warm)
            processes[index] = context.Process(target=child, args=arguments, daemon=True)
            processes[index].start()
        for index, end in ends.items():
            asked.show({"process": index, **(end.recv() if end.poll(120) else {"error": "no start"})})
        close_and_build(asked, ends, {index: int(each.pid or 0) for index, each in processes.items()}, store.port, lock)
        for process in processes.values():
            process.kill()


def close_and_build(asked: Asked, ends: dict[int, Connection], pids: dict[int, int], port: int, lock: str) -> None:
    """The first generation, the death of its last rank, and three generations with the standby as replacement."""
    mesh, show = asked.mesh, asked.show
    standby, victim, donor, members = mesh.size, mesh.size - 1, mesh.size // 2 - 1, range(mesh.size)
    for answer in tell(ends, {i: ("connect", port, "1/1", i) for i in members}).values():
        show({"generation": 1, **answer})
    show({"generation": 1, **tell(ends, {0: ("memory",)})[0]})
    if asked.contexts == "released":
        release(asked, ends, 1, list(members))
    show(tell(ends, {victim: ("hold", asked.hold_gib)})[victim])
    for index in members:
        ends[index].send(("exchange", ()))
    time.sleep(1.0)
    death = Death(pids[victim], lock)
    death.first_sign.wait()
    if not asked.at_once:
        show({"what": "death", **death.signs()})
    Path(lock + ".abort").touch()
    survivors = [i for i in members if i != victim]
    for index in survivors:
        show({"survivor": index, **(ends[index].recv() if ends[index].poll(60) else {"error": "not stopped"})})
    ranks = {**{i: i for i in survivors}, standby: victim}
    for generation in (2, 3, 4):
        build(asked, ends, generation, {i: ("connect", port, f"1/{generation}", rank) for i, rank in ranks.items()})
        if generation == 2 and asked.at_once:
            show({"what": "death", **death.signs()})
        if generation == 2 and asked.contexts == "released":
            release(asked, ends, 2, [standby])
    for answer in tell(ends, {donor: ("heal", 0, 4), standby: ("heal", 1, 4)}).values():
        show(answer)


def build(asked: Asked, ends: dict[int, Connection], generation: int, calls: dict[int, tuple[Any, ...]]) -> None:
    begun = time.monotonic()
    answers = tell(ends, calls)
    wall_s = time.monotonic() - begun
    for answer in answers.values():
        asked.show({"generation": generation, **answer})
    totals = [answer.get("total_s", 0.0) for answer in answers.values()]
    asked.show({"generation": generation, "what": "built", "wall_s": wall_s, "median_s": statistics.median(totals)})
    asked.show({"generation": generation, **tell(ends, {0: ("memory",)})[0]})


def release(asked: Asked, ends: dict[int, Connection], generation: int, indices: list[int]) -> None:
    """These processes release their contexts on other GPUs at once; memory used on the first GPU before and after."""
    before = tell(ends, {0: ("memory",)})[0]
    for answer in tell(ends, {index: ("release",) for index in indices}).values():
        asked.show({"generation": generation, **answer})
    after = tell(ends, {0: ("memory",)})[0]
    asked.show(
        {
            "generation": generation,
            "what": "released",
            "used_gib_before": before.get("used_gib"),
            "used_gib_after": after.get("used_gib"),
        }
    )


def contexts(text: str) -> str:
    unknown = [name for name in text.split(",") if name not in CONTEXTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: choose of {','.join(CONTEXTS)}")
    return text


def main(argv: list[str]) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--hold-gib", type=int, default=20)
    parser.add_argument(
        "--contexts", type=contexts, default="own", help=f"several of {','.join(CONTEXTS)}: where members have them"
    )
    parser.add_argument("--at-once", action="store_true", help="build groups while the killed process still ends")
    parser.add_argument(
        "--warm",
        choices=["none", "one", "all"],
        default="one",
        help="groups that the standby has had before: one on each GPU, as the product has too, or one of all GPUs",
    )
    args = parser.parse_args(argv)
    if torch.cuda.device_count() not in MESHES:
        parser.error(f"{torch.cuda.device_count()} GPUs: this needs 2 or 4, choose them by CUDA_VISIBLE_DEVICES")
    mesh = MESHES[torch.cuda.device_count()]
    for variant, where in product(args.variants.split(","), args.contexts.split(",")):
        # New processes per variant: NCCL reads its environment once.
        asked = Asked(variant, where, mesh, args.hold_gib, args.at_once, args.warm)
        process = multiprocessing.get_context("spawn").Process(target=measure, args=(asked,))
        process.start()
        process.join(120)
        if process.is_alive():
            asked.show({"error": "not done within 120 s"})
            process.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
