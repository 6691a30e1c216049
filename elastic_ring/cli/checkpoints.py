"""`elastic-ring checkpoints list|verify|prune|export URI/NAME`: what a run has saved, and whether every byte is right.

Needs neither Ray nor the run's code.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="elastic-ring checkpoints", description=(__doc__ or "").split("\n")[0])
    verbs = made.add_subparsers(dest="verb", required=True)
    for verb, says in (
        ("list", "step, size and age of each checkpoint, newest first"),
        ("verify", "read every byte; exit 1 and name each file that is not what was written"),
        ("prune", "remove all but the newest"),
        ("export", "write the parameters as safetensors files with an index, as Hugging Face reads them"),
    ):
        verb_parser = verbs.add_parser(verb, help=says, description=says)
        verb_parser.add_argument("uri", help="the run's folder: storage path and name, local or s3://bucket/runs/NAME")
        if verb == "prune":
            verb_parser.add_argument("--keep-last", type=int, default=2, metavar="N", help="how many stay (2)")
            verb_parser.add_argument("--keep-every", type=int, default=0, metavar="N", help="and each Nth step (none)")
        if verb == "export":
            verb_parser.add_argument("--to", required=True, help="a folder or s3:// prefix")
            verb_parser.add_argument("--step", type=int, help="which checkpoint (the newest)")
            verb_parser.add_argument(
                "--shard-mib", type=int, default=5120, metavar="N", help="the size of a file (5120)"
            )
    return made


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    from elastic_ring.errors import ElasticRingError
    from elastic_ring.state.storage import Storage

    try:
        storage = Storage(options.uri).open(write=False)
        match options.verb:
            case "list":
                return _list(storage)
            case "verify":
                return _verify(storage)
            case "prune":
                return _prune(storage, options)
            case _:
                return _export(storage, options)
    except ValueError as error:
        print(f"checkpoints: {error}", file=sys.stderr)
        return 2
    except ElasticRingError as error:
        print(f"checkpoints: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _list(storage: Any) -> int:
    from elastic_ring.state import checkpoint

    folders = checkpoint.committed(storage)
    if not folders:
        print(f"no checkpoint in {storage.uri}")
    for folder in folders:
        manifest = checkpoint.read_manifest(storage, folder)
        age_s = time.time() - manifest.run.get("written_unix_s", time.time())
        print(
            f"step {manifest.step}  lineage {manifest.lineage}  {manifest.num_bytes / 2**20:,.1f} MiB in "
            f"{len(manifest.files)} files  cp={manifest.cp}  {age_s / 60:,.0f} min old  {storage.at(folder)}"
        )
    return 0


def _verify(storage: Any) -> int:
    from tqdm import tqdm

    from elastic_ring.errors import CheckpointDamaged
    from elastic_ring.state import checkpoint

    wrong: list[str] = []
    folders = checkpoint.committed(storage)
    for folder in tqdm(folders, unit="checkpoint", disable=None):
        try:
            wrong += checkpoint.wrong_files(storage, checkpoint.read_manifest(storage, folder))
        except CheckpointDamaged as error:
            wrong.append(str(error))
    for line in wrong:
        print(line)
    print(f"{len(folders)} checkpoint(s), {len(wrong)} wrong file(s)")
    return 1 if wrong else 0


def _prune(storage: Any, options: argparse.Namespace) -> int:
    from elastic_ring.state import checkpoint

    if options.keep_last < 1:
        raise ValueError(f"--keep-last {options.keep_last}: at least 1, the newest that verifies is never removed")
    removed = checkpoint.prune(storage, options.keep_last, options.keep_every)
    uploads = storage.abort_uploads(checkpoint.FOLDER)
    print(f"{len(removed)} checkpoint(s) removed, {uploads} unfinished upload(s) ended")
    return 0


def _export(storage: Any, options: argparse.Namespace) -> int:
    from elastic_ring.state import checkpoint
    from elastic_ring.state.storage import Storage

    for folder in checkpoint.committed(storage):
        manifest = checkpoint.read_manifest(storage, folder)
        if options.step in (None, manifest.step):
            break
    else:
        raise ValueError(f"--step {options.step}: no such checkpoint in {storage.uri}; `list` shows what there is")
    target = Storage(options.to).open()
    reader = checkpoint.Reader(storage, manifest)
    groups = list(_groups(manifest, options.shard_mib << 20))
    index: dict[str, str] = {}
    for number, names in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = {key.removeprefix("params/"): reader.tensor(key, 0, 1) for key in names}
        target.write(name, checkpoint.safetensors_chunks(tensors, {"format": "pt"}))
        index |= dict.fromkeys(tensors, name)
    total = sum(_num_bytes(manifest, key) for names in groups for key in names)
    record = {"metadata": {"total_size": total, "step": manifest.step}, "weight_map": index}
    target.replace("model.safetensors.index.json", json.dumps(record, indent=1).encode())
    print(
        f"step {manifest.step}: {len(index)} tensors, {total / 2**20:,.1f} MiB in {len(groups)} files in {target.uri}"
    )
    return 0


def _num_bytes(manifest: Any, key: str) -> int:
    import math

    from elastic_ring.state.checkpoint import DTYPES

    found = manifest.tensors[key]
    return math.prod(found.shape) * int(DTYPES[found.dtype].itemsize)


def _groups(manifest: Any, limit_bytes: int) -> Iterator[list[str]]:
    """Parameters in order, as many to a file as `limit_bytes` allows, at least one."""
    group: list[str] = []
    for key in (key for key in manifest.tensors if key.startswith("params/")):
        if group and sum(_num_bytes(manifest, other) for other in [*group, key]) > limit_bytes:
            yield group
            group = []
        group.append(key)
    if group:
        yield group
