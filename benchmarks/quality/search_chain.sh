#!/bin/bash
# The search and what it predicts: a Llama of 110 M from a config, its own BPE, Python sources; a dense run, a search from
# its checkpoint, and the training that the search advises, whose last lines say the step and loss predicted and seen.
# In the repository's root, on one GPU; stages are cut at their limits. Sequences are long enough that the GPU sets the
# pace: at 8,192 tokens the host did, whose speed differed by 40 % from one minute to the next.
# SMALL=1: the same chain on two CPU cores. Pictures, tables and logs come under $OUT.
set -u
OUT=$(realpath "${OUT:-/tmp/tune-out}"); W=$(mktemp -d); PY=$(command -v "${PY:-python3}"); ROOT=$PWD; mkdir -p "$OUT"; T0=$SECONDS
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" RAY_USAGE_STATS_ENABLED=0 PYTHONDONTWRITEBYTECODE= PYTHONUNBUFFERED=1 RAY_ADDRESS=local
if [ -n "${SMALL:-}" ]; then
  HOW="--device cpu --dp 1 --cp 1 --spares 0 --context 1024 --global-batch 2 --step.param-dtype float32"; DENSE=16 FIND=8
  SIZES="2 64 128 512 400000"; DENSITY=0.4
else
  HOW="--preset 100m --dp 1 --cp 1 --spares 0 --context 65536 --global-batch 1"; DENSE=80 FIND=24
  SIZES="12 768 2048 16384 28000000"; DENSITY=0.2
fi
stage() { echo "== $(( SECONDS - T0 )) s: $1"; }
cd "$W"
stage "texts, tokenizer, config"
$PY - $SIZES <<'P' || exit 1
import json, pathlib, sys, sysconfig
layers, width, ffn, vocab, most = map(int, sys.argv[1:])
import tokenizers, transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
places = [pathlib.Path(sysconfig.get_path("stdlib")), *map(pathlib.Path, __import__("torch").__path__)]
left, texts = most, []
for place in places:
    for path in sorted(place.rglob("*.py")):
        if left <= 0: break
        text = path.read_text(encoding="utf-8", errors="ignore")
        if len(text) > 2000:
            texts.append(text); left -= len(text)
with open("texts.jsonl", "w") as file:
    for text in texts: file.write(json.dumps({"text": text}) + "\n")
tok = Tokenizer(models.BPE(unk_token=None)); tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False); tok.decoder = decoders.ByteLevel()
tok.train_from_iterator(texts[:max(1, len(texts) // 4)], trainers.BpeTrainer(vocab_size=vocab, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
transformers.PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|end|>").save_pretrained("llama")
heads = max(1, width // 64)
json.dump({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width, "intermediate_size": ffn, "num_hidden_layers": layers,
  "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 64, "vocab_size": vocab, "max_position_embeddings": 65536, "rms_norm_eps": 1e-5,
  "rope_theta": 10000.0, "tie_word_embeddings": False, "eos_token_id": 0, "hidden_act": "silu", "torch_dtype": "float32"}, open("llama/config.json", "w"))
print(f"{len(texts)} files, {sum(map(len, texts)):,} characters, {len(tok.get_vocab())} tokens")
P
cat > space.toml <<S
family = ["near"]
density = [$DENSITY]
layers = ["{rule}", "{rule};dense@{last}", "{rule};dense@{half}"]
S
ring() { limit=$1; shift; timeout --foreground "$limit" $PY -m elastic_ring "$@"; }
stage "data prepare"
ring 60 data prepare --source texts.jsonl --tokenizer llama --align-tokens 128 --workers 0 --out prepared 2>&1 | tail -n 4
COMMON="$HOW --model-folder llama --data prepared/manifest.json"
stage "dense, $DENSE steps"
ring 200 train $COMMON --steps $DENSE --val-every $DENSE --run-name dense > "$OUT/dense.log" 2>&1 || tail -n 15 "$OUT/dense.log"
tail -n 6 "$OUT/dense.log"
stage "tune, $FIND steps a trial"
ring 240 tune --out found --space space.toml --trials 3 $COMMON --steps $FIND --optim.warmup-steps 8 --from runs/dense > "$OUT/tune.log" 2> "$OUT/tune.err" || tail -n 15 "$OUT/tune.err"
cat "$OUT/tune.log"; cp found/front.* "$OUT/" 2>/dev/null
grep -h "kernel\|flex\|reject\|left out" "$OUT/tune.err" | sort | uniq -c | sort -rn | head -5
NEXT=$(grep '^elastic-ring train' "$OUT/tune.log" | tail -n 1 | sed 's/^elastic-ring //')
[ -n "$NEXT" ] || { stage "no front"; exit 1; }
stage "train --pattern FOUND"
eval "ring 130 $NEXT" > "$OUT/sparse.log" 2>&1 || tail -n 15 "$OUT/sparse.log"
tail -n 8 "$OUT/sparse.log"
stage "ended"
