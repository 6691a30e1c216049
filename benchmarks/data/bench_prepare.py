"""How fast `elastic-ring data prepare` is beside a loop over the same documents in one process.

    python benchmarks/data/bench_prepare.py [--mib 100] [--vocab 8192] [--workers 0,1,2] [--save]

The corpus: JSON lines, a document each, of the Python files that this environment's packages ship. The tokenizer: a
byte-level BPE of `tokenizers`, trained on the first 4 MiB. The loop reads lines, encodes document by document and adds
up tokens; it writes nothing. Ours reads, encodes, writes Parquet shards with digests, and the manifest; `0` workers is
this process alone, others are processes of a Ray cluster that is started before the clock. Times are of one run each,
in one process, one after the other; `x loop` is the rate over the loop's.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness import results, runs
from benchmarks.harness.arguments import bench_parser, list_of

SAMPLE_BYTES = 4 << 20
END = "<|end|>"


def documents(num_bytes: int) -> Iterator[str]:
    """Python files of the environment in the order of their paths, about `num_bytes` in all."""
    total = 0
    for path in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        if not text.strip():
            continue
        yield text
        total += len(text.encode())
        if total >= num_bytes:
            return
    raise SystemExit(f"--mib: this environment ships only {total >> 20} MiB of Python files; ask for less")


def write_corpus(path: Path, num_bytes: int) -> int:
    """The corpus as JSON lines; how many documents."""
    number = 0
    with path.open("w", encoding="utf-8") as file:
        for text in documents(num_bytes):
            file.write(json.dumps({"text": text}) + "\n")
            number += 1
    return number


def train_tokenizer(corpus: Path, folder: Path, vocab_size: int) -> None:
    """Save a byte-level BPE of the corpus's beginning as a tokenizer's folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_beginning(corpus), trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))


def _beginning(corpus: Path) -> Iterator[str]:
    total = 0
    with corpus.open(encoding="utf-8") as lines:
        for line in lines:
            if total > SAMPLE_BYTES:
                return
            total += len(line)
            yield json.loads(line)["text"]


def loop(corpus: Path, folder: Path) -> tuple[float, int]:
    """(seconds, tokens) of a loop in one process, document by document."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    begun, num_tokens = time.monotonic(), 0
    with corpus.open(encoding="utf-8") as lines:
        for line in lines:
            num_tokens += len(tokenizer.encode(json.loads(line)["text"]).ids) + 1  # the end of the document
    return time.monotonic() - begun, num_tokens


def ours(corpus: Path, folder: Path, out: Path, workers: int) -> tuple[float, int, str]:
    """(seconds, tokens, manifest's digest)."""
    from elastic_ring.data.preparation.prepare import PrepareConfig, prepare

    config = PrepareConfig(sources=(str(corpus),), out=str(out), tokenizer=str(folder), workers=workers)
    begun = time.monotonic()
    manifest = prepare(config)
    return time.monotonic() - begun, manifest.num_tokens, manifest.digest


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--mib", type=int, default=100, help="size of the corpus (100)")
    parser.add_argument("--vocab", type=int, default=8192, help="of the tokenizer (8192)")
    parser.add_argument("--workers", type=list_of(int), default=[0, 1, 2], help="numbers of processes (0,1,2)")
    parser.add_argument("--save", action="store_true", help="write the table and a JSON into benchmarks/results/data/")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as name:
        text, record, equal = measure(Path(name), options.mib << 20, options.vocab, options.workers)
    results.show(text)
    if options.save:
        results.save("data", "bench_prepare", text, record)
    return 0 if equal else 1


def measure(folder: Path, num_bytes: int, vocab: int, workers: list[int]) -> tuple[str, dict[str, Any], bool]:
    """The table, what it is made of, and whether every preparation had the loop's tokens and one digest."""
    corpus, tokenizer = folder / "corpus.jsonl", folder / "tokenizer"
    num_documents = write_corpus(corpus, num_bytes)
    train_tokenizer(corpus, tokenizer, vocab)
    size = corpus.stat().st_size
    loop_s, num_tokens = loop(corpus, tokenizer)
    rows: list[list[object]] = [["loop, one process", loop_s, num_documents / loop_s, size / loop_s / 1e6, 1.0]]
    digests, counts = set(), {num_tokens}
    with runs.local_ray(max([1, *workers])):
        for number in workers:
            taken_s, counted, digest = ours(corpus, tokenizer, folder / f"out-{number}", number)
            digests.add(digest)
            counts.add(counted)
            name = f"prepare, {number} worker(s)" if number else "prepare, in this process"
            rows.append([name, taken_s, num_documents / taken_s, size / taken_s / 1e6, loop_s / taken_s])
    head = f"{size / 1e6:.0f} MB, {num_documents:,} documents, {num_tokens:,} tokens of a vocabulary of {vocab:,}\n"
    equal = len(digests) == 1 and len(counts) == 1
    tail = "\nequal tokens and one digest: " + ("yes" if equal else f"NO: {sorted(counts)}, {sorted(digests)}")
    table = results.table(["", "s", "documents/s", "MB/s", "x loop"], rows)
    names = ("seconds", "documents_per_s", "mb_per_s", "ratio_to_loop")
    figures = {str(name): dict(zip(names, values, strict=True)) for name, *values in rows}
    return (
        head + table + tail,
        {"bytes": size, "documents": num_documents, "tokens": num_tokens, "rows": figures},
        equal,
    )


if __name__ == "__main__":
    sys.exit(main())
