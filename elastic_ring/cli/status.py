"""Show the mesh, generation, step, spares and last recoveries of a live or ended run.

    elastic-ring status RUN [--watch [SECONDS]] [--startup]
    elastic-ring status RUN --serve PORT

RUN is a run's folder, or s3://bucket/prefix/NAME. Reads the run's records only, so it works while the run trains, after
it, and without Ray. `--startup` says where the seconds until the first committed step went. `--serve` shows the records
as a page: loss, mesh over the steps, recoveries, what each rank does.
Exit status: 0; 2 with the reason when RUN is not a run or the port cannot be served on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from elastic_ring.cli import clear_screen
from elastic_ring.cli.operate import positive
from elastic_ring.control.facts import fact_of
from elastic_ring.errors import ElasticRingError
from elastic_ring.monitor.goodput import start_table
from elastic_ring.monitor.journal import salvage_file
from elastic_ring.monitor.json_files import as_written
from elastic_ring.monitor.metrics import JOURNAL_NAME
from elastic_ring.monitor.page import LOCAL, Page
from elastic_ring.monitor.report import render_status
from elastic_ring.runtime.run_storage import RunRecords


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        with RunRecords(options.run, lambda text: print(f"elastic-ring status: {text}", file=sys.stderr)) as records:
            if options.serve is not None:
                return _serve(records, options.host, options.serve)
            render = startup_text if options.startup else partial(render_status, look=records.look)
            return _print(records, render, options.watch)
    except (ValueError, ElasticRingError) as error:
        print(f"elastic-ring status: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="elastic-ring status", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="the run's folder, or s3://bucket/prefix/NAME")
    parser.add_argument(
        "--watch",
        nargs="?",
        const=1.0,
        type=positive,
        metavar="SECONDS",
        help="show again every SECONDS (1 if left out) until Ctrl-C",
    )
    parser.add_argument(
        "--startup", action="store_true", help="show where the seconds until the first committed step went"
    )
    parser.add_argument(
        "--serve", type=_port, metavar="PORT", help="serve the live page on this port until Ctrl-C; 0 for a free one"
    )
    parser.add_argument(
        "--host",
        default=LOCAL,
        help=f"address to serve on; everyone who reaches it sees the page ({LOCAL}: this machine only)",
    )
    return parser


def _print(records: RunRecords, render: Callable[[Path], str], watch_s: float | None) -> int:
    while True:
        text = render(records.look())
        if watch_s and sys.stdout.isatty():
            clear_screen()
        print(text, end="", flush=True)
        if not watch_s:
            return 0
        time.sleep(watch_s)


def startup_text(folder: Path) -> str:
    """Raises ValueError where there is no run."""
    render_status(folder)  # refuses what is no run
    with as_written(str(folder / JOURNAL_NAME)):
        return "\n".join(start_table(map(fact_of, salvage_file(folder / JOURNAL_NAME)[0]))) + "\n"


def _serve(records: RunRecords, host: str, port: int) -> int:
    render_status(records.look())  # refuses what is no run
    with Page(records.look, host, port) as page:
        print(f"{page.url} shows the run until Ctrl-C", flush=True)
        page.serve()
    return 0


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 65536:
        raise argparse.ArgumentTypeError(f"{text}: must be a port, 0 to 65535")
    return value
