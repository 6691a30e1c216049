"""One run on a real autoscaling Ray cluster (autoscaler v2) on this machine, from an empty cluster to an empty one.

    python benchmarks/recovery/autoscaling.py              about two minutes on two quiet cores
    python benchmarks/recovery/autoscaling.py --save       results, and the timeline as a picture

Nodes have two CPUs each, a ring has two ranks, the run may have one or two rings. In turn: the run is submitted to a
cluster without a node, starts, grows to max_dp; a node is drained with notice; a node is killed; the cluster may only
have one node; two again; the run is told to keep one ring, and leaves a node; it ends, and every node goes. Nobody but
the run asks the autoscaler for anything. The samples must be those that the order gives, whatever the cluster.

The story is that of the drill `autoscaling` (deploy/drills/autoscaling.py), with the benches' small model.
Exits 1 where something does not happen in time, a step is lost to a notice, or the samples differ.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness import results, runs
from benchmarks.harness.arguments import bench_parser
from deploy.drills import autoscaling
from deploy.drills.autoscaling import SlowUntil, Timeline

NAME = "autoscaling"
STEPS, STEP_S = 160, 0.4  # the story needs some 60 steps, of two or four sequences for each ring


def changing_run(folder: Path, timeline: Timeline) -> tuple[dict[str, Any], list[str]]:
    """(summary, each bound that does not hold, in words) of the benches' small run on the autoscaling cluster."""
    gate = folder / "gate"
    trainer = runs.small_trainer(
        folder,
        NAME,
        steps=STEPS,
        loss=SlowUntil(runs.small_loss, str(gate), STEP_S),
        check_model=False,
        scaling=autoscaling.scaling(),
    )
    return autoscaling.changing_run(folder, trainer, gate, timeline)


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--save", action="store_true", help="write results/scaling/autoscaling-DATE.txt, .json, .svg")
    options = parser.parse_args()
    timeline = Timeline()
    with tempfile.TemporaryDirectory(prefix="as-") as folder:
        _, told = changing_run(Path(folder), timeline)
    text = "\n".join([*(f"{at:7.1f} s  {what}" for at, what in timeline.events), results.verdict(told)])
    results.show(results.verdict(told))
    if options.save:
        from benchmarks.harness.timeline_plot import draw

        stem = results.save("scaling", NAME, text, {"events": timeline.events, "samples": timeline.samples})
        draw(stem.with_suffix(".svg"), timeline.samples, timeline.events)
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
