"""Drills: break a run on this machine as the world would, and show what follows.

    python -m deploy.drills --list
    python -m deploy.drills power-cut --cuts 1
    python -m deploy.drills power-cut --cuts 2 --in-save      in the middle of an upload, then of a manifest
    python -m deploy.drills power-cut --steps 20 -- --preset 100m --dp 2 --cp 2     what stands after -- goes to the run
    python -m deploy.drills autoscaling
    python -m deploy.drills memory
    python -m deploy.drills alert ElasticRingDriverSilent --hold-s 60      with a real Prometheus
    python -m deploy.drills alert all      every one of them, an hour; ends with a table of seconds
    python -m deploy.drills healthy --minutes 60      plants nothing: no alert may fire, no detector may find anything

Exit status: 0 when the run ended as the undisturbed one did, or the alert fired, or a healthy run was silent; 1 when
not; 2 for a wrong setting.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

DRILLS = {
    "power-cut": "kill every process of a run at once, Ray's too, and submit it again",
    "autoscaling": "a run on a cluster that grows and shrinks, from an empty one to an empty one; minutes",
    "memory": "a step that runs out of memory, then a worker that fills its node, beside undisturbed runs; two minutes",
    "alert": "plant the fault that makes an alert of deploy/monitoring/rules.yml fire: drill alert NAME",
    "healthy": "plant nothing, and find every false alarm of all rules and detectors; an hour",
}


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index("--") if "--" in given else len(given)
    options = _parser().parse_args(given[:end])
    options.train = given[end + 1 :]
    if options.list or not options.name:
        print(listed())
        return 0
    try:
        return _drill(options)
    except ValueError as error:
        print(f"drill: {error}", file=sys.stderr)
        return 2


def listed() -> str:
    """The drills, and the alerts that have one."""
    from deploy.drills import alerts

    lines = [f"{name:<14}{says}" for name, says in DRILLS.items()]
    lines += [f"  alert {name:<32}{drill.plants}" for name, drill in alerts.DRILLS.items()]
    return "\n".join(lines)


def _drill(options: argparse.Namespace) -> int:
    if options.name == "power-cut":
        from deploy.drills.power_cut import power_cut

        options.train = options.train or ["--preset", "laptop"]
        return power_cut(options)
    if options.name == "autoscaling":
        from deploy.drills.autoscaling import autoscaling

        return autoscaling(options.storage_path)
    if options.name == "memory":
        from deploy.drills.memory import memory

        return memory(options)
    if options.name == "alert":
        from deploy.drills.alert import alert

        return alert(options)
    if options.name == "healthy":
        from deploy.drills.healthy import healthy

        return healthy(options)
    raise ValueError(f"there is no drill {options.name!r}: {', '.join(DRILLS)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.drills", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", metavar="NAME")
    parser.add_argument("alert", nargs="?", default="", metavar="ALERT", help="for the drill alert: which one, or all")
    parser.add_argument("--list", action="store_true", help="the drills and what they do")
    parser.add_argument("--cuts", type=int, default=1, help="power-cut: how many power cuts in one run (1)")
    parser.add_argument("--steps", type=int, default=30, help="power-cut: steps of the run (30)")
    parser.add_argument("--every", type=int, default=5, metavar="STEPS", help="power-cut: between checkpoints (5)")
    parser.add_argument(
        "--in-save", action="store_true", help="power-cut: in a checkpoint's file, or before its manifest, in turns"
    )
    parser.add_argument("--seed", type=int, default=0, help="power-cut: of the moments of the cuts (0)")
    parser.add_argument("--storage-path", default="runs", help="where the runs' folders are made (runs)")
    parser.add_argument("--rules", default="deploy/monitoring/rules.yml", metavar="FILE", help="alert: the rules")
    parser.add_argument(
        "--alertmanager", default="", metavar="HOST:PORT", help="alert: who is told; nobody if left out"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="healthy: for how long the run trains (60)")
    parser.add_argument("--hold-s", type=float, default=0.0, help="alert: stay for so long once it fires (0)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
