#!/usr/bin/env bash
# Check kernels on one GPU while another generates tokens, then compare models on all GPUs with one process, on a machine
# without a network that is lent for ten minutes.
#
#     bash bench/checks_lease.sh --commit ID --out "$OUT"
#
#   --commit ID      commit for the rows, since git is not there
#   --out DIR        folder for rows and logs
#   --laws NAMES     ops whose laws run, as an expression of `pytest -k`; default "delta or additive"
#   --limit SECONDS  time of this call; default 570
#   --python FILE    Python; default python3
#   --wheels DIR     wheels of packages that the machine lacks; default .gpu/whl, if it exists
#   --site FILE      archive (.tar.xz) of a site folder with flash-linear-attention; default .gpu/fla.txz, if it exists
#
# GPU 0: tests/gpu/laws.sh, then tests/gpu/ops.sh. GPU 1: rows of `kalmix bench perf decode`. They have cores of their own.
# With one GPU, the rows come after the checks.
set -uo pipefail
commit=unknown out='' laws='delta or additive' limit=570 python=python3 wheels=.gpu/whl site=.gpu/fla.txz
while [ $# -gt 0 ]; do
  case $1 in
    --commit | --out | --laws | --limit | --python | --wheels | --site) declare "${1#--}=${2:?$1 needs a value}" ;;
    *) echo "error: $1 is not an option" >&2; exit 2 ;;
  esac
  shift 2
done
[ -n "$out" ] || { echo "error: --out is missing" >&2; exit 2; }
cd "$(dirname "$0")/.." || exit 2
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 COLUMNS=150 OMP_NUM_THREADS=4 PYTHON=$python
source bench/lease_common.sh
install_wheels
if [ -f "$site" ]; then mkdir -p "$work/fla" && tar -xJf "$site" -C "$work/fla"; fi
gpus=$(nvidia-smi -L 2> /dev/null | wc -l)
IFS=, read -ra all <<< "$("$python" -c 'import os; print(*sorted(os.sched_getaffinity(0)), sep=",")')"
half=$(((${#all[@]} + 1) / 2))
first=$(IFS=,; echo "${all[*]:0:$half}") rest=$(IFS=,; echo "${all[*]:$((half < ${#all[@]} ? half : 0))}")
kept=70  # seconds at the end, for the comparison of several GPUs
say() { echo "[$SECONDS s] $*"; }
least() { echo $(($1 < $2 ? $1 : $2)); }
left() { echo $((limit - SECONDS - $1)); }

checks() {
  export CUDA_VISIBLE_DEVICES=0 TMPDIR=$work/checks PYTHONPATH=$work/site
  mkdir -p "$TMPDIR"
  OUT=$out/laws LIMIT=$(least 250 "$(left $kept)") WORKERS=$half taskset -c "$first" bash tests/gpu/laws.sh -k "$laws" > "$out/laws.log" 2>&1
  say "laws: exit status $?: $(grep -E ' (passed|failed)' "$out/laws.log" | tail -1)"
  OUT=$out/ops LIMIT=$(left $kept) WORKERS=$half taskset -c "$first" bash tests/gpu/ops.sh > "$out/ops.log" 2>&1
  say "ops: exit status $?: $(grep -E ' (passed|failed)' "$out/ops.log" | tail -1)"
}
decode() {  # SECONDS, then arguments of `kalmix bench perf decode`
  local seconds
  seconds=$(least "$1" "$(left $kept)")
  shift
  [ "$seconds" -gt 30 ] || { say "decode $*: too little time is left"; return; }
  timeout -k 5 "$seconds" taskset -c "$rest" "$python" -c "from kalmix_bench.cli import app; app()" perf decode --preset paper \
    --no-peers --output "$out/decode" --row-limit 200 "$@" >> "$out/decode.log" 2>&1
  say "decode $*: exit status $?"
}
rows() {
  local gpu=$((gpus > 1 ? 1 : 0))
  export CUDA_VISIBLE_DEVICES=$gpu TMPDIR=$work/rows PYTHONPATH="$work/site:$PWD/src:$PWD/bench/src"
  mkdir -p "$TMPDIR"
  decode 170 --rows attention,retnet,afa-transformer,controlled-afa --caches captured
  decode 100 --rows gated-kalmanet,mamba2 --caches captured --batches 64 --prompts 8192
  decode 100 --rows llama --caches dynamic
  decode 90 --rows llama --caches static --prompts 512
  [ -d "$work/fla" ] || return
  export PYTHONPATH=$PYTHONPATH:$work/fla
  decode 400 --rows "fla gated-deltanet" --caches dynamic
}
say "ready, $gpus GPUs"
if [ "$gpus" -gt 1 ]; then
  (checks) & checking=$!
  (rows)
  wait $checking
  export PYTHONPATH="$work/site:$PWD/src:$PWD/bench/src"
  seconds=$(left 5)
  timeout -k 5 "$seconds" "$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus" -m kalmix_bench.perf.scaling.check \
    --output "$out/check" --deadline $((seconds - 15)) --limit 60 > "$out/check.log" 2>&1
  say "comparison: exit status $?"
  tail -5 "$out/check.log"
else
  (checks)
  (rows)
fi
for file in "$out"/*/results.jsonl; do
  if [ -f "$file" ]; then sed -i -E "s/\"commit\": (null|\"[^\"]*\")/\"commit\": \"$commit\"/" "$file"; fi
done
tar -czf "$out/all.tgz" -C "$out" --exclude all.tgz .
find "$out" -mindepth 1 -maxdepth 1 -type d -exec rm -r {} +
rm -rf "$work"
say end
