#!/usr/bin/env bash
# Check and time what several GPUs and long sequences need, on a machine with two or more GPUs and without a network
# that is lent for ten minutes.
#
#     bash bench/scaling_lease.sh --commit ID --out "$OUT"
#
#   --commit ID      commit for the rows, since git is not there
#   --out DIR        folder for rows and logs
#   --work DIR       folder on this machine for rows and logs; default /tmp/kalmix-scaling
#   --limit SECONDS  time of this call; default 575
#   --python FILE    Python; default python3
#   --wheels DIR     wheels of packages that the machine lacks; default .gpu/whl, if it exists
#
# 1. At the same time, GPU 0: tests of fused parts, such as the packed short convolution; GPU 1: tokens of `attention`.
# 2. All GPUs: captured steps of context parallelism (bayesian, hybrid), and FSDP2 of kla by groups of four blocks.
# 3. All GPUs: `kalmix_bench.perf.scaling.check`, in several programs that share the layers.
# 4. One sequence on each GPU, to compare with 2.
# Repeat the call on the same machine: it continues. Stages that ended with exit status 0 do not run again. Each call gives
# a comparison 60 s more than the one before, so that those that had no time to compile their kernels run again.
set -uo pipefail
commit=unknown out='' work=/tmp/kalmix-scaling limit=575 python=python3 wheels=.gpu/whl
while [ $# -gt 0 ]; do
  case $1 in
    --commit | --out | --work | --limit | --python | --wheels) declare "${1#--}=${2:?$1 needs a value}" ;;
    *) echo "error: $1 is not an option" >&2; exit 2 ;;
  esac
  shift 2
done
[ -n "$out" ] || { echo "error: --out is missing" >&2; exit 2; }
cd "$(dirname "$0")/.." || exit 2
gpus=$(nvidia-smi -L 2> /dev/null | wc -l)
[ "$gpus" -gt 1 ] || { echo "error: two GPUs are needed; there are $gpus" >&2; exit 2; }
mkdir -p "$out" "$work/run" "$work/ended"
echo >> "$work/calls"
export row_limit=$((60 * $(wc -l < "$work/calls")))
out=$(cd "$out" && pwd)
run="$work/run"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 COLUMNS=150 OMP_NUM_THREADS=4 NCCL_NVLS_ENABLE=0
export PYTHONPATH="$PWD/src:$PWD/bench/src:$work/site"
source bench/lease_common.sh
install_wheels
collect() {  # write the rows so far, with the commit, and the logs
  cp "$run"/*.log "$out"/ 2> /dev/null
  cat "$run"/speed/results.jsonl > "$out/speed.jsonl" 2> /dev/null
  cat "$run"/decode/results.jsonl 2> /dev/null |
    sed -E "s/\"commit\": (null|\"[^\"]*\")/\"commit\": \"$commit\"/" > "$out/decode.jsonl"
  cat "$run"/check/*/results.jsonl 2> /dev/null | sed -E "s/^\{/{\"commit\": \"$commit\", /" > "$out/check.jsonl"
}
(while sleep 15 &> /dev/null; do collect; done) &  # a call that is killed has its rows, too; no pipe waits for `sleep`
collecting=$!
trap 'kill $collecting 2> /dev/null; collect' EXIT
left() { echo $((limit - SECONDS - $1)); }
stage() {  # NAME SECONDS command: run it for at most so long; its output goes to NAME.log
  local name=$1 seconds=$2 begin=$SECONDS status=0
  shift 2
  local ended="$work/ended/$name-$(cksum <<< "$*" | cut -d ' ' -f 1)"
  if [ -f "$ended" ]; then return; fi
  [ "$seconds" -lt "$(left 5)" ] || seconds=$(left 5)
  [ "$seconds" -gt 20 ] || { echo "[$SECONDS s] $name: too little time is left"; return; }
  timeout -k 5 "$seconds" "$@" >> "$run/$name.log" 2>&1 || status=$?
  [ "$status" != 0 ] || touch "$ended"
  echo "[$SECONDS s] $name: exit status $status, $((SECONDS - begin)) s"
}
together() { "$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus" "$@"; }
speed() {
  together -m kalmix_bench.perf.scaling.speed --profile --commit "$commit" --output "$run/speed" "$@"
}
check() {  # compare layers until the deadline; each program has a port and a folder of its own
  together -m kalmix_bench.perf.scaling.check --output "$run/check/${1%%,*}" --limit "$row_limit" \
    --deadline "$deadline" --layers "$1"
}
export -f together speed check
export python gpus commit run
CUDA_VISIBLE_DEVICES=0 stage tests 150 "$python" -m pytest -q -n 8 tests/layers/fused &
CUDA_VISIBLE_DEVICES=1 stage decode 100 "$python" -c "from kalmix_bench.cli import app; app()" perf decode \
  --preset paper --no-peers --rows attention --caches captured --batches 1,64 --prompts 512,8192 \
  --output "$run/decode" --row-limit 60 &
wait_for_stages() { for process in $(jobs -p); do [ "$process" = "$collecting" ] || wait "$process"; done; }
wait_for_stages
# A capture that fails would make others in its process fail.
stage speed 90 bash -c 'speed --limit 80 --captured --models bayesian-340m --methods "context two-phase" --steps 8'
stage speed 160 bash -c 'speed --limit 150 --captured --models hybrid-340m --methods "context two-phase" --steps 8'
methods="one,fsdp2 by 4,fsdp2 by 4 kept"
stage speed 110 bash -c 'speed --limit 80 --compiled --models kla-340m --batch 4 --methods "$0"' "$methods"
seconds=$(left 10)
export deadline=$((seconds - 30))
for layers in kla,afa,gated-deltanet,retnet bayesian,attention,deltanet gated-kalmanet,controlled-afa,gla \
  kda,afa-transformer,linear-attention design,rt-afa,mamba2 hybrid,recurrent-afa; do
  stage check "$seconds" bash -c 'check "$0"' "$layers" &
done
wait_for_stages
for model in bayesian-340m hybrid-340m; do
  stage speed 80 bash -c 'speed --limit 70 --compiled --models "$0" --methods "context one" --steps 8' "$model"
done
collect
grep -h "are right" "$out/check.log"
grep -hE "tokens/s, |failed|passed" "$out"/*.log | tail -30
echo "[$SECONDS s] end"
