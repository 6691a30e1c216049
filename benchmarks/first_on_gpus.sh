#!/bin/bash
# What a change made without GPUs still owes, in the repository's root on a host of one or two GPUs:
#     bash benchmarks/first_on_gpus.sh            all of it, up to an hour if all parts reach their limits
#     bash benchmarks/first_on_gpus.sh tests steps      some parts: tests steps bars memory search drills hosts fp8 peers
# Each part is cut at its limit and prints its end; all output comes under $OUT. Where Python's packages have no bytecode,
# write it first (python -m compileall), or each process compiles all that it imports.
set -u
OUT=$(realpath "${OUT:-$(mktemp -d)}"); PY=$(command -v "${PY:-python3}"); mkdir -p "$OUT"; export OUT PY
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE= PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0
NUM=$($PY -c 'import torch; print(torch.cuda.device_count())')
part() { # NAME LIMIT_S LINES COMMAND...
  local name=$1 limit=$2 lines=$3; shift 3
  echo "== $(date +%T) $name"; timeout "$limit" "$@" > "$OUT/$name.log" 2>&1; echo "exit $?"; tail -n "$lines" "$OUT/$name.log"
}
tests() { # flash-attn-4 compiles for 10 to 30 s a shape: processes share what one has compiled
  export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 FLASH_ATTENTION_CUTE_DSL_CACHE_DIR=$OUT/flash-attn
  part attention 560 60 $PY -m pytest -v -o addopts=--import-mode=importlib -p no:benchmark -n 12 tests/gpu/attention
  part others 560 60 $PY -m pytest -v -o addopts=--import-mode=importlib -p no:benchmark tests/gpu --ignore tests/gpu/attention  # one fills a GPU; a call of its own
}
steps() {
  part host 90 22 $PY benchmarks/probes/probe_host_step.py --device cuda --context 256
  part step 340 40 $PY benchmarks/training/bench_step.py --rows 1b-keep,8b-keep,8b --steps 8 --profile
}
bars() { # of the ordinary step: repeatable bits against any, 32 K tokens, a ring of two at 8 K a GPU, a sparse call
  part repeatable 170 12 $PY benchmarks/training/bench_step.py --rows 1b-keep,1b-keep-fast,hf,hf-fast --steps 8
  part 32k 110 8 $PY benchmarks/training/bench_step.py --rows 8b-keep --context 32768 --steps 5
  part ring 110 8 $PY benchmarks/attention/bench_ring.py --heads 8:8 --head-dims 128 --tokens 16K --systems ours-nccl,ceiling
  part sparse 110 12 $PY benchmarks/attention/pattern_speed_gpu.py
}
memory() {
  part alive 90 16 $PY benchmarks/probes/probe_alive_gpu.py --model 1b
  part calibrate 150 45 $PY -m elastic_ring calibrate --limit-s 20 --storage "$OUT" --out "$OUT/calibrate.json"
}
search() { part search 600 14 bash benchmarks/quality/search_chain.sh; }
drills() { # a real Prometheus must be on the PATH, and all of ray[default] installed; the first two have a GPU each where there are two
  CUDA_VISIBLE_DEVICES=0 part ElasticRingDeviceFails 200 4 $PY -m deploy.drills alert ElasticRingDeviceFails & local fails=$!
  CUDA_VISIBLE_DEVICES=$(( NUM - 1 )) part ElasticRingDeviceHot 200 4 $PY -m deploy.drills alert ElasticRingDeviceHot & local hot=$!
  wait "$fails" "$hot"
  part ElasticRingHopLatency 240 4 $PY -m deploy.drills alert ElasticRingHopLatency
}
hosts() {
  part hosts-100m 200 8 $PY benchmarks/recovery/bench_hosts.py --hosts 3 --gpus "$NUM" --cases cp2,cp2-kill-host
  part hosts-1b 500 8 $PY benchmarks/recovery/bench_hosts.py --hosts 3 --gpus "$NUM" --preset 1b --context 4096 --cases cp2,cp2-kill-host
}
fp8() { # equal bits through a kill, then loss over 2,000 steps beside bf16, a GPU each where there are two
  local common="--preset 100m --dp 1 --cp 1 --context 1024 --global-batch 2" kind
  part fp8-whole 110 3 $PY -m elastic_ring train $common --linears fp8 --steps 40 --spares 0 --run-dir "$OUT/fp8-whole"
  part fp8-killed 130 3 $PY -m elastic_ring train $common --linears fp8 --steps 40 --spares 1 --run-dir "$OUT/fp8-killed" \
    --checkpoint-every-steps 10 --faults kill@step=25,phase=backward,rank=0
  part fp8-start 20 14 $PY -m elastic_ring status "$OUT/fp8-whole" --startup
  for kind in native fp8; do
    CUDA_VISIBLE_DEVICES=$([ $kind = native ] && echo 0 || echo $(( NUM - 1 ))) part "curve-$kind" 420 3 $PY -m elastic_ring train \
      $common --linears $kind --steps 2000 --spares 0 --run-dir "$OUT/curve-$kind" &
    [ "$NUM" -gt 1 ] || wait $!
  done
  wait
  $PY - "$OUT" <<'P'
import json, pathlib, statistics, sys
def loss(kind): return [one["loss"] for line in (pathlib.Path(sys.argv[1]) / f"curve-{kind}/metrics.jsonl").open() if "loss" in (one := json.loads(line))]
curves = {kind: loss(kind) for kind in ("native", "fp8")}
for end in (500, 1000, 1500, 2000):
    native, fp8 = (statistics.fmean(curve[end - 200:end]) for curve in curves.values())
    print(f"mean loss of steps {end - 200} to {end}: bf16 {native:.4f}, fp8 {fp8:.4f}, {100 * (fp8 / native - 1):+.2f} %")
P
}
peers() { part peers 300 12 $PY benchmarks/training/bench_experts.py --contexts 16K --rows send,dense,transformers,autoep --steps 5; }
for name in "${@:-tests steps bars memory search drills hosts fp8 peers}"; do for one in $name; do "$one"; done; done
echo "logs in $OUT"
