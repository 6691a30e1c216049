#!/bin/bash
# What a change made without GPUs still owes, in the repository's root on a host of one or two GPUs:
#     bash benchmarks/first_on_gpus.sh            all of it, up to an hour if all parts reach their limits
#     bash benchmarks/first_on_gpus.sh tests steps      some parts: tests steps memory search drills hosts
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
  part tests 550 60 $PY -m pytest -v -o addopts= -p no:benchmark -n 12 --dist worksteal tests/gpu
}
steps() {
  part host 90 22 $PY benchmarks/probes/probe_host_step.py --device cuda --context 256
  part step 340 40 $PY benchmarks/training/bench_step.py --rows 1b,1b-keep --steps 10 --profile
}
memory() {
  part alive 90 16 $PY benchmarks/probes/probe_alive_gpu.py --model 1b
  part calibrate 150 45 $PY -m elastic_ring calibrate --limit-s 20 --storage "$OUT" --out "$OUT/calibrate.json"
}
search() { part search 600 14 bash benchmarks/quality/search_chain.sh; }
drills() { # a real Prometheus must be on the PATH; the first two have a GPU each where there are two
  CUDA_VISIBLE_DEVICES=0 part ElasticRingDeviceFails 200 4 $PY -m deploy.drills alert ElasticRingDeviceFails & local fails=$!
  CUDA_VISIBLE_DEVICES=$(( NUM - 1 )) part ElasticRingDeviceHot 200 4 $PY -m deploy.drills alert ElasticRingDeviceHot & local hot=$!
  wait "$fails" "$hot"
  part ElasticRingHopLatency 240 4 $PY -m deploy.drills alert ElasticRingHopLatency
}
hosts() {
  part hosts-100m 200 8 $PY benchmarks/recovery/bench_hosts.py --hosts 3 --gpus "$NUM" --cases cp2,cp2-kill-host
  part hosts-1b 500 8 $PY benchmarks/recovery/bench_hosts.py --hosts 3 --gpus "$NUM" --preset 1b --context 4096 --cases cp2,cp2-kill-host
}
for name in "${@:-tests steps memory search drills hosts}"; do for one in $name; do "$one"; done; done
echo "logs in $OUT"
