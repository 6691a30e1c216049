"""Look at a cluster as a run will use it, before the run starts: a line for each check, with a verdict and a way out.

    elastic-ring doctor --preset 100m --storage-path s3://bucket/runs --data prepared/manifest.json
    elastic-ring doctor --config run.toml --json

Takes the settings of `elastic-ring train` and attaches to the same cluster (RAY_ADDRESS). Hosts whose GPUs are in use,
and clusters with a live run, get no load. Exits 0, 1 when something will fail, 2 for a wrong setting.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from elastic_ring.cli import refused
from elastic_ring.cli.settings import TrainSettings, parse
from elastic_ring.errors import ElasticRingError


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    own = argparse.ArgumentParser(
        prog="elastic-ring doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="Beside these all settings of `elastic-ring train`, --preset, --config, "
        "--data, --storage-path and the others: see its --help.",
    )
    own.add_argument("--json", action="store_true", help="print findings and reports as JSON")
    options, rest = own.parse_known_args(sys.argv[1:] if argv is None else argv)
    try:
        return _examine(parse(rest), as_json=options.json)
    except (ValueError, ElasticRingError) as error:
        return refused("elastic-ring doctor", error)


def _examine(asked: TrainSettings, *, as_json: bool) -> int:
    from elastic_ring.cli.data_settings import data_source
    from elastic_ring.runtime.doctor import examine, verdicts
    from elastic_ring.runtime.driver.ray_session import ray_session
    from elastic_ring.state.storage.folder import Storage

    shape, run = asked.model, asked.run
    folder = run.storage_uri.rpartition("/")[0] or "."
    storage = Storage(folder)
    data = data_source(asked.data, shape, asked.step.context_tokens)
    wanted = examine.Examination(
        asked.scaling,
        storage.root if storage.is_local else folder,
        data,
        (asked.model_folder,) if asked.model_folder else (),
        (asked.step.param_dtype, shape.head_dim, shape.num_heads // shape.num_kv_heads),
        run.timeouts,
    )
    with ray_session(asked.scaling, run.timeouts.lease_s):
        reports, findings = examine.examine(wanted)
    if as_json:
        print(examine.as_json(reports, findings))
    else:
        print("\n".join(finding.line() for finding in findings))
    return 1 if verdicts.will_fail(findings) else 0
