"""Commands for hosts, a cluster and its live runs: `calibrate`, `doctor`, `scale`, `drain`, `metrics`.

Nothing here trains; torch and Ray are imported after the arguments are read.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from inspect import cleandoc
from pathlib import Path

from elastic_ring.cli import refused
from elastic_ring.errors import ElasticRingError


def doctor(argv: Sequence[str] | None = None) -> int:
    """Look at a cluster as a run will use it, before it starts: a line for each check, with a verdict and a way out.

        elastic-ring doctor --preset 100m --storage-path s3://bucket/runs --data prepared/manifest.json
        elastic-ring doctor --config run.toml --json

    Takes the settings of `elastic-ring train` and attaches to the same cluster (RAY_ADDRESS). Hosts whose GPUs are in
    use, and clusters with a live run, get no load. Exits 0, 1 when something will fail, 2 for a wrong setting.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("elastic_ring.runtime.driver.ray_session").setLevel(logging.INFO)  # which Ray it looks at
    own = argparse.ArgumentParser(
        prog="elastic-ring doctor",
        description=cleandoc(doctor.__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="Beside these all settings of `elastic-ring train`, --preset, --config, "
        "--data, --storage-path and the others: see its --help.",
    )
    own.add_argument("--json", action="store_true", help="print findings and reports as JSON")
    options, rest = own.parse_known_args(sys.argv[1:] if argv is None else argv)
    from elastic_ring.cli.data_settings import data_source
    from elastic_ring.cli.settings import parse

    try:
        settings = parse(rest)
        from elastic_ring.runtime.doctor import examine, verdicts
        from elastic_ring.runtime.driver.ray_session import ray_session
        from elastic_ring.state.storage.folder import Storage

        shape, run = settings.model, settings.run
        folder = run.storage_uri.rpartition("/")[0] or "."
        storage = Storage(folder)
        examination = examine.Examination(
            settings.scaling,
            storage.root if storage.is_local else folder,
            data_source(settings.data, shape, settings.step),
            (settings.model_folder,) if settings.model_folder else (),
            (settings.step.param_dtype, shape.head_dim, shape.num_heads // shape.num_kv_heads),
            run.timeouts,
        )
        with ray_session(settings.scaling, run.timeouts.lease_s):
            reports, findings = examine.examine(examination)
    except (ValueError, ElasticRingError) as error:
        return refused("elastic-ring doctor", error)
    lines = [examine.as_json(reports, findings)] if options.json else [finding.line() for finding in findings]
    print("\n".join(lines))
    return 1 if verdicts.will_fail(findings) else 0


def scale(arguments: Sequence[str] | None = None) -> int:
    """Give a run that trains fewer or more rings and spares from now on.

    Surplus workers leave at the end of the step under way, whole nodes first; an autoscaler may then remove the nodes.
    The run asks for missing workers. Exit status: 0 on success, 1 when there is no such run, 2 for impossible numbers.
    """
    parser = argparse.ArgumentParser(prog="elastic-ring scale", description=(scale.__doc__ or "").split("\n\n")[1])
    parser.add_argument("run", metavar="NAME", help="name of the run")
    parser.add_argument("--max-dp", type=int, metavar="N", help="at most so many rings")
    parser.add_argument("--spares", type=int, metavar="N", help="so many spares")
    options = parser.parse_args(arguments)
    if options.max_dp is None and options.spares is None:
        print("elastic-ring scale: give --max-dp or --spares", file=sys.stderr)
        return 2
    from elastic_ring.runtime.driver import attach

    try:
        attach.scale(options.run, options.max_dp, options.spares)
    except (ValueError, ElasticRingError) as error:
        return refused("elastic-ring scale", error)
    return 0


def drain(arguments: Sequence[str] | None = None) -> int:
    """Tell Ray that a node leaves, and wait until no run has a worker on it.

    Members hand their place over at the end of the step under way, spares leave at once. Exit status: 0 when all have
    left, 1 when some are still there at the deadline (the run then loses them as it loses any other) or when Ray
    refuses, 2 for the head and for a node that Ray does not know.
    """
    parser = argparse.ArgumentParser(prog="elastic-ring drain", description=(drain.__doc__ or "").split("\n\n")[1])
    parser.add_argument("--node-id", metavar="ID", help="Ray's id of the node (the one that this runs on)")
    parser.add_argument("--deadline-s", type=positive, default=100.0, metavar="S", help="when the node goes (100)")
    options = parser.parse_args(arguments)
    from elastic_ring.runtime.driver import cluster

    try:
        remaining = cluster.drain(options.node_id, options.deadline_s)
    except (ValueError, ElasticRingError) as error:
        return refused("elastic-ring drain", error)
    if remaining:
        print(f"elastic-ring drain: still here after {options.deadline_s:g} s: {', '.join(remaining)}", file=sys.stderr)
        return 1
    print(f"no run has a worker on {options.node_id or 'this node'}")
    return 0


def calibrate(arguments: Sequence[str] | None = None) -> int:
    """Measure this host: messages between its ranks, its kernels, groups, collectives, copies and storage.

        elastic-ring calibrate --out machine.json                 all GPUs, or two CPU processes over gloo
        elastic-ring calibrate --ranks 4 --heads 16:4 --head-dim 128 --limit-s 60 --out machine.json
        elastic-ring calibrate --hosts 2 --host 0 --meet 10.0.0.1:29400 --storage /checkpoints --out machine.json

    All ranks measure at the same time, each in its own process; the figures are the slowest rank's. Prints the figures,
    and each measurement next to its prediction; `not fitted` ones were left out of the fit, so a large error there
    means a bad fit. The file is for `--machine` of `elastic-ring train` and `elastic-ring forecast`. Nothing else
    should run meanwhile. With `--hosts` run it on each of them, so that collectives over the network are measured, too.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    parser = argparse.ArgumentParser(
        prog="elastic-ring calibrate",
        description=cleandoc(calibrate.__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    parser.add_argument("--ranks", type=int, default=0, help="processes; 0: one for each GPU, 2 on CPUs (0)")
    parser.add_argument("--heads", default="8:2", type=heads, help="query:K/V heads (8:2)")
    parser.add_argument("--head-dim", default=64, type=int, help="(64)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on GPUs, float32 on CPUs")
    parser.add_argument("--fast", action="store_true", help="kernels whose gradients need not repeat bit for bit")
    parser.add_argument("--limit-s", default=60.0, type=float, help="seconds after which nothing is repeated (60)")
    parser.add_argument("--repeats", default=7, type=int, help="of every case; the median counts (7)")
    parser.add_argument("--most-mib", default=64, type=int, help="the longest message, MiB (64)")
    parser.add_argument("--hosts", default=1, type=int, help="that measure together (1)")
    parser.add_argument("--host", default=0, type=int, help="which of them this is, from 0 (0)")
    parser.add_argument("--meet", metavar="ADDRESS:PORT", help="of host 0, where there are several")
    parser.add_argument("--storage", type=Path, metavar="DIR", help="where checkpoints go: how fast files are written")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write figures and measurements there, as JSON")
    options = parser.parse_args(arguments)
    from elastic_ring.tuning.calibrate_host import run

    return run(options)


def heads(text: str) -> tuple[int, int]:
    query, _, keys = text.partition(":")
    return int(query), int(keys or query)


def metrics(arguments: Sequence[str] | None = None) -> int:
    """The metrics that a run exports, as a Markdown table: `elastic-ring metrics --table`."""
    parser = argparse.ArgumentParser(prog="elastic-ring metrics", description=metrics.__doc__)
    parser.add_argument("--table", action="store_true", required=True, help="print name, type, unit, labels, meaning")
    parser.parse_args(arguments)
    from elastic_ring.runtime.coordinator.folds.metrics_table import markdown

    print(markdown(), end="")
    return 0


def positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0 seconds")
    return value
