"""Write a run's final weights for another program: `elastic-ring export RUN --format huggingface --out FOLDER`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(
        prog="elastic-ring export", description="Write a run's final weights for another program.", allow_abbrev=False
    )
    parser.add_argument("run", help="the run's folder, or s3://bucket/prefix/NAME")
    parser.add_argument(
        "--format",
        choices=["huggingface"],
        default="huggingface",
        help="huggingface: what from_pretrained loads (the default)",
    )
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
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
    asked = parser.parse_args(argv)
    from elastic_ring.errors import ElasticRingError
    from elastic_ring.integrations.transformers.export import export

    try:
        run = asked.run.removeprefix("file://")
        done = export(
            run,
            asked.out,
            dtype=asked.dtype,
            tokenizer=asked.tokenizer,
            max_file_size=asked.max_file_size,
            allow_dense=asked.allow_dense,
            merge=asked.merge,
        )
    except ValueError as error:
        print(f"elastic-ring export: {error}", file=sys.stderr)
        return 2
    except ElasticRingError as error:
        print(f"elastic-ring export: {error}", file=sys.stderr)
        return 1
    print(
        f"{done.num_tensors} tensors in {done.dtype}, {done.num_bytes / 2**20:,.1f} MiB in {done.num_files} file(s); "
        f"all of it in {done.folder}"
    )
    return 0
