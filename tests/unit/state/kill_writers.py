"""A process whose children write checkpoints until it kills one in the middle, at a random moment.

    python kill_writers.py URI SEED

For each line on stdin: the next writer starts, is killed with SIGKILL, and one line says which steps it has committed.
Forked, so that only the first one imports torch.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from secrets import token_hex

import torch

from elastic_ring.state.checkpoints import checkpoint
from elastic_ring.state.checkpoints.checkpoint import ShardPart
from elastic_ring.state.checkpoints.manifest import Described, Manifest, attempt_folder
from elastic_ring.state.header import Counters, ShardMeta
from elastic_ring.state.storage.folder import Storage

CP = 2
NUM_FLOATS = 20 * (1 << 20) // 4
"""Of each rank: 20 MiB, so that an object is a multipart upload."""


def save(storage: Storage, step: int) -> None:
    folder, files = attempt_folder(step, 1, token_hex(8)), []
    meta = ShardMeta(Counters(), (), {})
    for cp_rank in range(CP):
        tensors = {"params/weight": torch.full((NUM_FLOATS,), float(step))}
        files.append(checkpoint.write_part(storage, folder, ShardPart(cp_rank, 0, tensors, meta)))
    described = {"params/weight": Described("F32", (CP * NUM_FLOATS,), False, 0)}
    assert checkpoint.commit(storage, Manifest(step, 1, 1, "identity", folder, CP, 1, tuple(files), described, meta))


def write(uri: str, first: int, told: int) -> None:
    storage = Storage(uri).open()
    for step in range(first, first + 1000):
        os.write(told, f"begun {time.monotonic()}\n".encode())
        save(storage, step)
        os.write(told, f"committed {step} {time.monotonic()}\n".encode())


def main(uri: str, seed: str) -> None:
    rng, first, save_s = random.Random(seed), 1, 1.0
    for _ in sys.stdin:
        told, tell = os.pipe()
        writer = os.fork()
        if not writer:
            write(uri, first, tell)
        os.close(tell)
        lines = os.fdopen(told)
        begun_s = float(lines.readline().split()[1])
        # Within the first or the second checkpoint: before, in and between the uploads, in and after the commit.
        time.sleep(rng.uniform(0.0, 2 * save_s))
        os.kill(writer, signal.SIGKILL)
        assert os.waitpid(writer, 0)[1] == signal.SIGKILL
        words = [line.split() for line in lines if line.startswith("committed")]
        steps = [int(step) for _, step, _ in words]
        if words:
            save_s = (float(words[-1][2]) - begun_s) / len(words)
        else:  # or a slow store would never let one commit
            save_s *= 1.5
        first = (steps[-1] if steps else first) + 2  # the one that was cut off may have been committed
        print(*steps, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
