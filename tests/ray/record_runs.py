"""Records five small runs for `tests/unit/monitor/test_recorded_runs.py`: journal, metrics, summary, status, gzipped.

python -m tests.ray.record_runs             records all of them, in some minutes
python -m tests.ray.record_runs kill drain  records these

Nothing that says where they ran is kept: folders, hosts, addresses and users have other names in the records.
"""

from __future__ import annotations

import argparse
import getpass
import gzip
import json
import re
import socket
import sys
import tempfile
from pathlib import Path

import ray

from elastic_ring.monitor.journal import read
from elastic_ring.monitor.json_files import json_bytes
from elastic_ring.runtime.driver.cluster import NAMESPACE
from tests.journals import journal_bytes
from tests.ray.conftest import check_records, tiny_trainer
from tests.ray.fork_server import ForkServer
from tests.ray.recovery.test_reshaped import shrunk_and_grown
from tests.unit.monitor.recorded_runs import ADDRESS, NAMES, OF_A_MACHINE, RECORDED, RUNS, STEPS, STORAGE

IP = re.compile(r"\b(?!127\.|0\.)\d{1,3}(?:\.\d{1,3}){3}\b")


def scrubbed(text: str, folder: Path) -> str:
    """The text without folders, users and addresses of this machine. Raises: ValueError where some are left."""
    for place, name in ((str(folder), STORAGE), (sys.prefix, "/python"), (sys.base_prefix, "/python")):
        text = text.replace(place, name)
    text = IP.sub(ADDRESS, text.replace(socket.gethostname(), "host"))
    words = [word for word in (getpass.getuser(), socket.gethostname()) if re.search(rf"\b{re.escape(word)}\b", text)]
    if words or OF_A_MACHINE.search(text):
        raise ValueError(f"a record names this machine: {words or OF_A_MACHINE.findall(text)} in {text}")
    return text


def without_machine(file: Path, folder: Path) -> bytes:
    """A file's content for the record. Checksums are computed anew."""
    if file.suffix == ".json":
        return json_bytes(json.loads(scrubbed(file.read_text(encoding="utf-8"), folder)))
    return journal_bytes(json.loads(scrubbed(json.dumps(record), folder)) for record in read(file))


def record(name: str, folder: Path) -> None:
    settings, gate = RUNS[name], folder / f"{name}-gate"
    trainer = tiny_trainer(
        folder,
        name,
        faults=settings.faults,
        steps=STEPS,
        slow_s=settings.slow_s,
        gate=gate if name == "growth" else None,
        gate_s=1.0,
        spares=settings.spares,
        val_every_steps=settings.val_every_steps,
        run={"checkpoint_config": settings.checkpoints},
    )
    result = shrunk_and_grown(trainer, gate, folder / name) if name == "growth" else trainer.fit()
    check_records(trainer, result)
    contents = {file: without_machine(result.path / file, folder) for file in NAMES}
    (RECORDED / name).mkdir(parents=True, exist_ok=True)
    for file, content in contents.items():
        (RECORDED / name / f"{file}.gz").write_bytes(gzip.compress(content, mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"of {', '.join(RUNS)}; all if left out")
    names = parser.parse_args().runs or list(RUNS)
    with tempfile.TemporaryDirectory() as runs, ForkServer(Path(runs)) as server, server.forking():
        ray.init("local", num_cpus=8, namespace=NAMESPACE, include_dashboard=False, log_to_driver=False)
        for name in names:
            record(name, Path(runs))
            print(f"{name}: recorded")
        ray.shutdown()


if __name__ == "__main__":
    main()
