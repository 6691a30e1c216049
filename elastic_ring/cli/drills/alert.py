"""The drill `alert`: a small real run with a planted fault, until a real Prometheus says that the alert fires."""

from __future__ import annotations

import argparse
import logging
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from elastic_ring.cli.drills.alerts import DRILLS, SMALL, AlertDrill
from elastic_ring.cli.drills.local_cluster import OPEN, LocalCluster, free_ports
from elastic_ring.cli.drills.planted import Scene
from elastic_ring.cli.drills.processes import start_training
from elastic_ring.cli.drills.prometheus import Prometheus, faster, rule_of
from elastic_ring.config import RunConfig

log = logging.getLogger(__name__)

FIRES_S = 240.0
LOOK_S = 0.5


def alert(options: argparse.Namespace) -> int:
    """Exit status 0 once the alert fires, 1 when it does not within FIRES_S. Raises ValueError for what is missing."""
    name = options.alert
    if name not in DRILLS:
        raise ValueError(f"there is no drill for the alert {name!r}: give one of {', '.join(DRILLS)}")
    rules = Path(options.rules)
    if not rules.is_file():
        raise ValueError(f"--rules {rules}: there is no such file; give deploy/monitoring/rules.yml of the project")
    if shutil.which("prometheus") is None:
        raise ValueError("the program prometheus is not installed (Debian: apt install prometheus)")
    drill = DRILLS[name]
    rule = faster(rule_of(rules.read_text(), name), drill.speed, drill.constants)
    log.info("%s: %s; the rule's times are divided by %g", name, drill.plants, drill.speed)
    with tempfile.TemporaryDirectory(prefix="er-", ignore_cleanup_errors=True) as folder, ExitStack() as stack:
        return _watch(name, drill, rule, Path(folder), options, stack)


def _watch(name: str, drill: AlertDrill, rule: str, folder: Path, options: argparse.Namespace, stack: ExitStack) -> int:
    """The run, its fault, and what Prometheus says of it."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what the drill has started ends with it
    stack.callback(signal.signal, signal.SIGTERM, before)
    token = secrets.token_hex(8)
    run = RunConfig(name=f"{name}-{secrets.token_hex(2)}", storage_path=options.storage_path)
    cluster = stack.enter_context(LocalCluster(folder / "ray", drill.cpus, token))
    (port,) = free_ports(1)
    prometheus = stack.enter_context(
        Prometheus(folder, port, cluster.metrics, rule, token, alertmanager=options.alertmanager)
    )
    arguments = [*SMALL, *drill.train, *options.train, "--run-name", run.name, "--storage-path", options.storage_path]
    training = start_training(arguments, folder / "train.log", token, {**OPEN, "RAY_ADDRESS": cluster.address})
    scene = Scene(run, cluster, training, token)
    stack.callback(training.wait)  # left in reverse: first the scene ends, then everything is killed
    stack.callback(cluster.__exit__)
    stack.callback(scene.over.set)
    if drill.plant is not None:
        _plant(name, drill, rule, scene, prometheus, folder / "train.log")
    begun_s, told = time.monotonic(), _fires(prometheus, folder / "train.log", training)
    if told is None:
        print(f"{name} has not fired within {FIRES_S:.0f} s; the run: {run.folder}")
        return 1
    log.info("fires %.0f s later", time.monotonic() - begun_s)
    print(_said(name, told, run, Path(options.rules)))
    if options.hold_s:
        print(f"for {options.hold_s:g} s: {prometheus.url}/alerts", flush=True)
        time.sleep(options.hold_s)
    return 0


def _plant(
    name: str, drill: AlertDrill, rule: str, scene: Scene, prometheus: Prometheus, said: Path
) -> None:  # fmt: skip
    """Once the run trains, Prometheus sees it, and the alert is silent."""
    if drill.after_steps:
        try:
            scene.until("the first steps", lambda: scene.num_steps() >= drill.after_steps)
            scene.until("that Prometheus sees the run", lambda: prometheus.sees(scene.run.name))
        except SystemExit as error:
            raise SystemExit(f"{error}\n{said.read_text(errors='replace')[-2000:]}") from None
        if (early := prometheus.alert()) is not None and early["state"] == "firing":
            raise SystemExit(f"elastic-ring drill: {name} fires before anything is planted: a false alarm")
    assert drill.plant is not None
    if drill.measured is not None:
        prometheus.replace(faster(rule, 1.0, drill.measured()))
    drill.plant(scene)
    log.info("planted after %d steps", scene.num_steps())


def _fires(prometheus: Prometheus, said: Path, training: Any) -> dict[str, Any] | None:
    """The alert once it fires."""
    deadline, refused = time.monotonic() + FIRES_S, False
    while time.monotonic() < deadline:
        found = prometheus.alert()
        if found is not None and found["state"] == "firing":
            return found
        if training.poll() == 2 and not refused:
            raise SystemExit(f"elastic-ring drill: the run was refused:\n{said.read_text(errors='replace')[-2000:]}")
        time.sleep(LOOK_S)
    return None


def _said(name: str, fired: dict[str, Any], run: RunConfig, rules: Path) -> str:
    """What fired, and what the runbook says to look at."""
    notes = fired["annotations"]
    lines = [f"{name} fires: {notes['summary']}", f"severity: {fired['labels']['severity']}"]
    page = rules.resolve().parents[2] / notes["runbook"].partition("#")[0]
    section = re.search(rf"^### {name}\n(.*?)(?=^##|\Z)", page.read_text(), re.M | re.S) if page.is_file() else None
    lines += re.findall(r"^- \*\*(?:Look at|Do)\*\*.*?(?=^- |\Z)", section[1], re.M | re.S) if section else []
    status = f"elastic-ring status {run.folder}"
    return "\n".join([*(line.rstrip() for line in lines), f"runbook: {notes['runbook']}", f"the run: {status}"])
