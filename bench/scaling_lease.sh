#!/usr/bin/env bash
# Check and time what several GPUs and long sequences need, on a machine with two or more GPUs and without a network
# that is lent for ten minutes.
#
#     bash bench/scaling_lease.sh --commit ID --out "$OUT"
#
#   --commit ID      commit for the rows, since git is not there
#   --out DIR        folder for rows and logs
#   --limit SECONDS  time of this call; default 575
#   --python FILE    Python; default python3
#   --wheels DIR     wheels of packages that the machine lacks; default .gpu/whl, if it exists
#
# 1. At the same time, GPU 0: tests of updates and their linear systems; GPU 1: `kalmix_bench.perf.spans`.
# 2. All GPUs: captured steps of context parallelism (bayesian, hybrid), and FSDP2 of kla by groups of four blocks.
# 3. All GPUs: `kalmix_bench.perf.scaling.check` until the time ends, in several programs that share the layers.
set -uo pipefail
commit=unknown out='' limit=575 python=python3 wheels=.gpu/whl
while [ $# -gt 0 ]; do
  case $1 in
    --commit | --out | --limit | --python | --wheels) declare "${1#--}=${2:?$1 needs a value}" ;;
    *) echo "error: $1 is not an option" >&2; exit 2 ;;
  esac
  shift 2
done
[ -n "$out" ] || { echo "error: --out is missing" >&2; exit 2; }
cd "$(dirname "$0")/.." || exit 2
gpus=$(nvidia-smi -L 2> /dev/null | wc -l)
[ "$gpus" -gt 1 ] || { echo "error: two GPUs are needed; there are $gpus" >&2; exit 2; }
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 COLUMNS=150 OMP_NUM_THREADS=4 NCCL_NVLS_ENABLE=0
export PYTHONPATH="$PWD/src:$PWD/bench/src:$work/site"
if compgen -G "$wheels/*.whl" > /dev/null; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$work/site" "$wheels"/*.whl
fi
left() { echo $((limit - SECONDS - $1)); }
stage() {  # NAME SECONDS command: run it for at most so long; its output goes to NAME.log
  local name=$1 seconds=$2 begin=$SECONDS
  shift 2
  [ "$seconds" -lt "$(left 5)" ] || seconds=$(left 5)
  [ "$seconds" -gt 20 ] || { echo "[$SECONDS s] $name: too little time is left"; return; }
  timeout -k 5 "$seconds" "$@" >> "$out/$name.log" 2>&1
  echo "[$SECONDS s] $name: exit status $?, $((SECONDS - begin)) s"
}
together() { "$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus" "$@"; }
speed() {
  together -m kalmix_bench.perf.scaling.speed --profile --commit "$commit" --output "$out/speed" --limit 65 "$@"
}
check() {  # SECONDS layers: compare them; each program has a port and a folder of its own
  together -m kalmix_bench.perf.scaling.check --output "$out/check/${2%%,*}" --limit 60 --deadline "$1" --layers "$2"
}
export -f together speed check
export python gpus commit out
tests=(tests/ops/test_dense_solve.py tests/ops/test_updates.py)
CUDA_VISIBLE_DEVICES=0 stage tests 150 "$python" -m pytest -q -n 8 "${tests[@]}" &
CUDA_VISIBLE_DEVICES=1 stage spans 150 "$python" -m kalmix_bench.perf.spans --reference float32 --commit "$commit" \
  --deadline 110 --output "$out/spans.jsonl" &
wait
for model in bayesian-340m hybrid-340m; do  # a capture that fails would make others in its process fail
  stage speed 80 bash -c 'speed --captured --models "$0" --methods "context two-phase" --steps 8' "$model"
  stage speed 80 bash -c 'speed --compiled --models "$0" --methods "context one" --steps 8' "$model"
done
stage speed 80 bash -c 'speed --compiled --models kla-340m --methods "one,fsdp2,fsdp2 by 4" --batch 4'
seconds=$(left 10)
for layers in kla,afa,gated-deltanet,retnet bayesian,attention,deltanet gated-kalmanet,controlled-afa,gla \
  kda,afa-transformer,linear-attention design,rt-afa,mamba2 hybrid,recurrent-afa; do
  stage check "$seconds" bash -c 'check "$@"' check $((seconds - 30)) "$layers" &
done
wait
cat "$out"/check/*/results.jsonl 2> /dev/null | sed -E "s/^\{/{\"commit\": \"$commit\", /" > "$out/check.jsonl"
grep -h "are right" "$out/check.log"
grep -hE "tokens/s, |failed|passed" "$out"/*.log | tail -30
tail -8 "$out/spans.log"
echo "[$SECONDS s] end"
