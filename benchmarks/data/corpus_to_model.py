"""From a folder of JSON lines to a Llama that `from_pretrained` loads, in four commands, through two disasters.

    python benchmarks/data/corpus_to_model.py [--mib 100] [--steps 16] [--s3] [--save]

Made first, outside the four: a corpus of the Python files that this environment ships, a byte-level BPE trained on its
beginning, and a small tied Llama with random values, as `save_pretrained` writes it. Then

  1  elastic-ring data prepare   the corpus into token shards and a manifest
  2  elastic-ring train          a worker is killed in step 3; after a checkpoint every process, Ray's too, gets SIGKILL
  3  elastic-ring train          the same command again: resumes
  4  elastic-ring export         the folder that transformers loads

and a second, undisturbed run, whose losses, samples and weights the first must have. At last the logits of the
exported model, by transformers' own attention, beside those of the module that trained. With `--s3` corpus, shards and
run folders lie in a bucket of Ceph's gateway (Debian's radosgw, ceph-mon, ceph-osd), and the power cut takes all local
files of the run. Times are those of one run.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.data.bench_prepare import train_tokenizer, write_corpus
from benchmarks.harness import results
from benchmarks.harness.arguments import at_least_one, bench_parser
from deploy.drills.power_cut import Watched
from deploy.drills.processes import MARK, kill_everything
from elastic_ring.state.storage.folder import Storage

CONTEXT, CHECKPOINT_EVERY, VOCAB = 1024, 4, 8192
LIMIT_S, LOOK_S = 900.0, 0.05
COPY_BYTES = 8 << 20
FAULT = "kill@step=3,phase=backward,rank=3"
RECORDS = ("losses", "samples_sha256", "weights_sha256")


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--mib", type=at_least_one, default=100, help="size of the corpus (100)")
    parser.add_argument("--steps", type=at_least_one, default=16)
    parser.add_argument("--s3", action="store_true", help="shards and run folders in an object store")
    parser.add_argument("--save", action="store_true", help="write the table and a JSON into benchmarks/results/data/")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, storage(Path(name), options.s3) as base:
        text, record, equal = walk(Path(name), base, options.mib << 20, options.steps)
    results.show(text)
    if options.save:
        results.save("data", "corpus_to_model-s3" if options.s3 else "corpus_to_model", text, record)
    return 0 if equal else 1


@contextlib.contextmanager
def storage(folder: Path, s3: bool) -> Iterator[str]:
    """Where shards and runs lie: a folder, or a new bucket of a store that ends with this process."""
    if not s3:
        yield str(folder / "storage")
        return
    from tests.object_store.store import ObjectStore, free_ports

    store = ObjectStore(folder / "store", free_ports(2), [str(os.getpid())])
    store.start()
    os.environ.update(store.environment)
    try:
        yield f"s3://{store.new_bucket()}/storage"
    finally:
        store.stop()


def walk(folder: Path, base: str, num_bytes: int, num_steps: int) -> tuple[str, dict[str, Any], bool]:
    """The table, what it is made of, and whether all of it was equal."""
    (folder / "corpus").mkdir()
    num_documents = write_corpus(folder / "corpus" / "documents.jsonl", num_bytes)
    save_llama(folder)
    corpus = f"{base}/corpus" if "://" in base else f"{folder}/corpus"
    if "://" in base:
        upload(folder / "corpus" / "documents.jsonl", corpus)
    prepared = run(
        ["data", "prepare", "--source", corpus, "--tokenizer", f"{folder}/llama", "--out", f"{base}/prepared"]
    )
    common = [
        "train",
        "--model-folder",
        f"{folder}/llama",
        "--data",
        f"{base}/prepared/manifest.json",
        "--dp",
        "2",
        "--cp",
        "2",
        "--spares",
        "1",
        "--context",
        str(CONTEXT),
        "--global-batch",
        "4",
        "--steps",
        str(num_steps),
        "--checkpoint-every-steps",
        str(CHECKPOINT_EVERY),
        "--storage-path",
        f"{base}/runs",
    ]
    struck, calm = Watched("tuned", f"{base}/runs"), Watched("undisturbed", f"{base}/runs")
    command = [*common, "--run-name", "tuned", "--faults", FAULT]
    cut_s, num_killed = cut(command, struck, folder / "log")
    resumed = run(command)
    exported = run(["export", f"{base}/runs/tuned", "--format", "huggingface", "--out", f"{folder}/tuned-model"])
    run([*common, "--run-name", "undisturbed"])
    found, expected = (json.loads((one.look() / "summary.json").read_text()) for one in (struck, calm))
    equal = {key: found[key] == expected[key] for key in RECORDS}
    logits, learned = difference(folder, f"{base}/runs/tuned", folder / "tuned-model")
    resumed_at = [one["step"] for one in found["resumed_from"]]
    rows: list[list[object]] = [
        ["1 data prepare", prepared],
        ["2 train, until the power cut", cut_s],
        ["3 train again, to its end", resumed],
        ["4 export", exported],
    ]
    # A summary has the recoveries of its own submission; the worker died in the one before.
    recoveries = [line for line in (folder / "log").read_text().splitlines() if "took its place" in line]
    text = "\n".join(
        [
            f"{num_bytes >> 20} MiB, {num_documents:,} documents; {num_steps} steps of 4 sequences of {CONTEXT} tokens",
            f"corpus, shards and run folders in {'an object store' if struck.run.is_remote else 'a folder'}",
            results.table(["command", "s"], rows),
            *recoveries,
            f"power cut: {num_killed} processes killed; resumed at steps {', '.join(map(str, resumed_at))}",
            f"as the undisturbed run: {', '.join(f'{key} {same}' for key, same in equal.items())}",
            f"logits of from_pretrained: at most {logits:.2g} from the trainer's, {learned:.2g} from the first values'",
        ]
    )
    record = {
        "seconds": {str(name): seconds for name, seconds in rows},
        "recoveries": recoveries,
        "killed": num_killed,
        "resumed_at": resumed_at,
        "equal": equal,
        "logits_apart": logits,
        "logits_learned": learned,
    }
    good = all(equal.values()) and bool(recoveries) and bool(resumed_at) and logits < 1e-4 < learned
    return text, record, good


def upload(path: Path, uri: str) -> None:
    with path.open("rb") as file:
        Storage(uri).replace(path.name, iter(lambda: file.read(COPY_BYTES), b""))


def save_llama(folder: Path) -> None:
    """A small tied Llama with random values and the corpus's tokenizer, in `folder`/llama."""
    import torch
    import transformers

    train_tokenizer(folder / "corpus" / "documents.jsonl", folder / "llama", VOCAB)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "llama")


def run(arguments: list[str]) -> float:
    """One command to its end, in a Ray of its own; its seconds."""
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "elastic_ring", *arguments],
        env=variables(""),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"elastic-ring {' '.join(arguments)}: exit status {done.returncode}\n{done.stderr[-3000:]}")
    return time.monotonic() - begun


def variables(token: str) -> dict[str, str]:
    given = {"RAY_ADDRESS": "local", "PYTHONPATH": str(results.ROOT)}
    return {**os.environ, **given, **({MARK: token} if token else {})}


def cut(arguments: list[str], watched: Watched, log: Path) -> tuple[float, int]:
    """Train until the worker has been replaced and a later checkpoint counts, then kill everything: (s, processes)."""
    token, begun = secrets.token_hex(8), time.monotonic()
    with log.open("ab") as told:
        process = subprocess.Popen(
            [sys.executable, "-m", "elastic_ring", *arguments], env=variables(token), stdout=told, stderr=told
        )
    while not any(step > CHECKPOINT_EVERY for step in watched.checkpoints()):
        if process.poll() is not None or time.monotonic() > begun + LIMIT_S:
            kill_everything(token)
            raise SystemExit(f"it ended before it could be cut; it said:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(LOOK_S)
    num_killed = kill_everything(token)
    process.wait()
    if watched.run.is_remote:
        shutil.rmtree(watched.run.folder.parent, ignore_errors=True)
    return time.monotonic() - begun, num_killed


def difference(folder: Path, trained: str, exported: Path) -> tuple[float, float]:
    """Largest difference of logits: the exported model's from the trainer's module's, and from the model before."""
    import torch
    import transformers

    from elastic_ring import load_weights
    from elastic_ring.attention.layouts.layout import make_layout
    from elastic_ring.attention.patterns.sparse import Pattern
    from elastic_ring.attention.plan.schedule import plan
    from elastic_ring.attention.ring import RingAttention
    from elastic_ring.integrations.transformers import ring_model

    module = ring_model(folder / "llama")()
    load_weights(module, trained)
    tokens, positions = torch.randint(0, VOCAB, (1, CONTEXT)), torch.arange(CONTEXT)[None]
    ring = RingAttention(plan(Pattern(), make_layout("zigzag", CONTEXT, 1)), 0, None)
    after, before = (
        transformers.AutoModelForCausalLM.from_pretrained(one, attn_implementation="eager", dtype=torch.float32).eval()
        for one in (exported, folder / "llama")
    )
    with torch.no_grad():
        ours = module.eval()(tokens, positions=positions, document_ids=positions.int(), attention=ring)
        theirs = after(tokens, use_cache=False).logits
        return float((theirs - ours).abs().max()), float((theirs - before(tokens, use_cache=False).logits).abs().max())


if __name__ == "__main__":
    sys.exit(main())
