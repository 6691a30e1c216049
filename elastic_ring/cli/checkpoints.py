"""`elastic-ring checkpoints list|verify|prune|export RUN`: what a run has saved, and whether every byte is right.

RUN is the run's folder, local or s3://bucket/runs/NAME. Needs neither Ray nor the run's code, and unpickles nothing.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_ring.cli import refused
from elastic_ring.errors import ElasticRingError
from elastic_ring.files import few

if TYPE_CHECKING:
    from elastic_ring.state.storage.folder import Storage

UNFINISHED_AFTER_S = 3600.0
VERBS = {
    "list": "each checkpoint, newest first, and what does not count",
    "verify": "read every byte of each checkpoint; exit 1 and name each file that is not what was written",
    "prune": "remove all but the newest checkpoints, and what writers that died have left",
    "export": "write the newest checkpoint as safetensors or for torch.distributed.checkpoint",
}
NOT_ZERO3 = {
    "verify": "it has no digests; `list` compares its files with what was written",
    "prune": "Ray Train removes old ones (num_to_keep); older unfinished ones remove by hand, once no run writes",
    "export": "it is in DeepSpeed's format; train to the last step, then use `elastic-ring export`",
}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="elastic-ring checkpoints", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="|".join(VERBS))
    for verb, says in VERBS.items():
        verb_parser = verbs.add_parser(verb, help=says, description=f"{says[0].upper()}{says[1:]}.")
        verb_parser.add_argument("run", metavar="RUN", help="the run's folder: storage path and name")
        if verb == "prune":
            verb_parser.add_argument("--keep-last", type=_positive, default=2, metavar="N", help="how many stay (2)")
            verb_parser.add_argument(
                "--keep-every", type=int, default=0, metavar="N", help="and the steps divisible by N"
            )
            verb_parser.add_argument(
                "--unfinished-after-s",
                type=float,
                default=UNFINISHED_AFTER_S,
                metavar="SECONDS",
                help="an attempt newer than all checkpoints is under way until nothing was added to it for so long "
                "(3600); 0 where no run writes",
            )
            verb_parser.add_argument(
                "--rejected", action="store_true", help="also those that failed their verification"
            )
        if verb == "export":
            verb_parser.add_argument(
                "--to", required=True, metavar="FOLDER", help="an empty folder; safetensors also to s3://"
            )
            verb_parser.add_argument("--step", type=int, metavar="N", help="of this step (the newest)")
            verb_parser.add_argument(
                "--format",
                choices=("safetensors", "dcp"),
                default="safetensors",
                help="safetensors: parameters by name, with an index (elastic-ring export writes for transformers); "
                "dcp: parameters, optimizer and counters for torch.distributed.checkpoint (safetensors)",
            )
            verb_parser.add_argument(
                "--shard-mib", type=_positive, default=5120, metavar="N", help="MiB of a file (5120)"
            )
    return parser


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 1 for a damaged checkpoint or a storage that fails; 2 for a mistake of the user."""
    options = parser().parse_args(arguments)
    from elastic_ring.state.checkpoints import zero3
    from elastic_ring.state.storage.folder import Storage, open_or_refuse

    verbs = {"list": _list, "verify": _verify, "prune": _prune, "export": _export}
    try:
        storage = open_or_refuse(options.run, write=False, setting="RUN")
        if storage.is_local:  # a person waits, and mends a folder better than time does
            storage = Storage(storage.uri, timeout_s=0.0)
        if (why := NOT_ZERO3.get(options.verb)) and (folder := next(iter(zero3.saved(storage)), None)):
            raise ValueError(f"{options.verb}: {storage.at(folder)} is of ZeRO-3 in Ray Train: {why}")
        return verbs[options.verb](storage, options)
    except (ValueError, ElasticRingError) as error:
        return refused("elastic-ring checkpoints", error)


def _list(storage: Storage, options: argparse.Namespace) -> int:
    from elastic_ring.errors import CheckpointDamaged
    from elastic_ring.state.checkpoints import checkpoint, retention, zero3

    rows = [("step", "lineage", "mesh", "size", "files", "saved", "folder")]
    for folder in checkpoint.committed(storage):
        try:
            manifest = checkpoint.read_manifest(storage, folder)
        except CheckpointDamaged as error:
            lineage, step = ("" if number < 0 else str(number) for number in checkpoint.age_key(folder))
            rows.append((step, lineage, "damaged", "", "", "", str(error)))
            continue
        saved = next(entry for entry in storage.entries(folder, recursive=False) if entry.path.endswith("COMMIT.json"))
        rows.append(
            (
                str(manifest.step),
                str(manifest.lineage),
                f"{manifest.num_parts}x{manifest.cp}",
                size(manifest.num_bytes),
                str(len(manifest.files)),
                age(saved.modified_unix_s),
                storage.at(folder),
            )
        )
    for name, state in zero3.saved(storage).items():
        entries = storage.entries(name)
        rows.append(
            (
                str(zero3.age_key(name)[1]),
                str(zero3.age_key(name)[0]),
                f"{state.num_workers} workers" if isinstance(state, zero3.SavedState) else "",
                size(sum(entry.num_bytes for entry in entries)),
                str(len(entries)),
                age(max((entry.modified_unix_s for entry in entries), default=0.0)),
                f"{storage.at(name)}{f' {state}' if isinstance(state, str) else ''}",
            )
        )
    if len(rows) == 1 and storage.is_local and not Path(storage.root).is_dir():
        raise ValueError(f"{storage.uri}: there is no such folder: give the run's, storage path and name")
    print(table(rows) if len(rows) > 1 else f"no checkpoint in {storage.uri}")
    for rejected in retention.set_aside_checkpoints(storage):
        print(f"set aside: {rejected.folder}, {size(rejected.num_bytes)}: {'; '.join(rejected.reasons)}")
    left = retention.leftovers(storage, 0.0)
    if left.files or left.uploads:
        print(f"in no checkpoint: {len(left.files)} file(s), {size(left.num_bytes)}, {len(left.uploads)} upload(s)")
    return 0


def _verify(storage: Storage, options: argparse.Namespace) -> int:
    from elastic_ring.state.checkpoints import checkpoint

    folders = checkpoint.committed(storage)
    if not folders:
        raise ValueError(f"no checkpoint in {storage.uri}: give the run's folder, storage path and name")
    num_wrong = 0
    for folder in folders:
        begun = time.monotonic()
        wrong = checkpoint.wrong_with(storage, folder)
        print(f"{folder}: {'WRONG' if wrong else 'every byte is right'} ({time.monotonic() - begun:.1f} s)", flush=True)
        for line in wrong:
            print(f"  {line}")
        num_wrong += bool(wrong)
    if num_wrong:
        print(f"{num_wrong} of {len(folders)} checkpoint(s) must not be used", file=sys.stderr)
    return 1 if num_wrong else 0


def _prune(storage: Storage, options: argparse.Namespace) -> int:
    from elastic_ring.state.checkpoints import checkpoint, retention

    removed = retention.prune(storage, options.keep_last, options.keep_every, read_bytes=True)
    num_rejected = retention.remove_set_aside(storage) if options.rejected else 0
    left = retention.leftovers(storage, options.unfinished_after_s)
    retention.remove_leftovers(storage, left, options.unfinished_after_s)
    steps = f" (steps {', '.join(map(str, sorted(removed)))})" if removed else ""
    print(f"removed {len(removed)} checkpoint(s){steps}, {num_rejected} that had been set aside,")
    print(f"{len(left.files)} file(s) of none ({size(left.num_bytes)}), {len(left.uploads)} unfinished upload(s)")
    if not removed:
        kept = sorted(checkpoint.age_key(folder)[1] for folder in checkpoint.committed(storage))
        why = "each lineage keeps its newest, and the best of keep_best and the newest whole one stay"
        print(f"kept: steps {few(kept, 20) or 'none'}; {why}")
    return 0


def _export(storage: Storage, options: argparse.Namespace) -> int:
    from elastic_ring.errors import CheckpointDamaged
    from elastic_ring.state.checkpoints import checkpoint, export
    from elastic_ring.state.storage.folder import Storage, open_or_refuse

    for folder in checkpoint.committed(storage):
        try:
            manifest = checkpoint.read_manifest(storage, folder)
        except CheckpointDamaged as error:
            print(f"elastic-ring checkpoints: left out: {error}", file=sys.stderr)
            continue
        if options.step in (None, manifest.step):
            break
    else:
        step_text = "" if options.step is None else f"--step {options.step}: "
        raise ValueError(f"{step_text}no such checkpoint in {storage.uri}; `elastic-ring checkpoints list` shows them")
    if options.format == "dcp" and not Storage(options.to).is_local:
        raise ValueError(f"--to {options.to}: torch.distributed.checkpoint is written to a folder; copy it from there")
    target = open_or_refuse(options.to, setting="--to")
    if there := next(iter(target.names()), None):
        raise ValueError(f"--to {options.to}: holds {there[0]} already; give an empty or a new folder")
    reader = export.verified_reader(storage, manifest)
    if options.format == "dcp":
        export.export_dcp(reader, Path(target.root))
    else:
        export.export_safetensors(reader, target, options.shard_mib << 20)
    written = list(target.names())
    total = sum(num_bytes for _, num_bytes in written)
    print(f"step {manifest.step}: {size(total)} in {len(written)} file(s) in {target.uri}")
    return 0


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, the last one as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)] for row in rows]
    return "\n".join("  ".join([*cells, row[-1]]) for cells, row in zip(lines, rows, strict=True))


def size(num_bytes: int) -> str:
    amount, units = float(num_bytes), iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while amount >= 1024 and unit != "TiB":
        amount, unit = amount / 1024, next(units)
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:,.1f} {unit}"


def age(unix_s: float) -> str:
    seconds = max(0.0, time.time() - unix_s)
    for unit, length_s in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def export_weights(argv: Sequence[str] | None = None) -> int:
    """Write a run's weights for another program: `elastic-ring export RUN --format huggingface --out FOLDER`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(
        prog="elastic-ring export", description="Write a run's weights for another program.", allow_abbrev=False
    )
    parser.add_argument("run", help="the run's folder, or s3://bucket/prefix/NAME")
    parser.add_argument(
        "--format",
        choices=["huggingface"],
        default="huggingface",
        help="huggingface: what from_pretrained loads (the default)",
    )
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--step", type=int, metavar="N", help="of the checkpoint of this step (the final weights)")
    parser.add_argument("--best", action="store_true", help="of the checkpoint that --keep-best keeps")
    parser.add_argument("--base-model", metavar="NAME", help="the model folder's name in the export (its last part)")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="type of the weights; by default what the run computed in",
    )
    parser.add_argument(
        "--tokenizer",
        help="bytes, or the folder of the tokenizer to copy; by default the model folder's, or the preset's",
    )
    parser.add_argument("--max-file-size", default="5GB", help="of one file of weights (5GB)")
    parser.add_argument(
        "--allow-dense",
        action="store_true",
        help="export layers whose pattern no config of transformers says, as layers that attend to all earlier tokens",
    )
    parser.add_argument(
        "--merge", action="store_true", help="of a run with --lora: whole weights in place of a folder of adapters"
    )
    options = parser.parse_args(argv)
    from elastic_ring.integrations.transformers.export import export

    try:
        done = export(
            options.run.removeprefix("file://"),
            options.out,
            step=options.step,
            best=options.best,
            base_model=options.base_model,
            dtype=options.dtype,
            tokenizer=options.tokenizer,
            max_file_size=options.max_file_size,
            allow_dense=options.allow_dense,
            merge=options.merge,
        )
    except (ValueError, ElasticRingError) as error:
        print(f"elastic-ring export: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    print(
        f"{done.num_tensors} tensors in {done.dtype}, {done.num_bytes / 2**20:,.1f} MiB in {done.num_files} file(s); "
        f"all of it in {done.folder}"
    )
    return 0
