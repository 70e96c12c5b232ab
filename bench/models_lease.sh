#!/usr/bin/env bash
# Time training steps of models on a machine without a network that is lent for ten minutes (`kalmix bench perf models`).
#
#     bash bench/models_lease.sh --commit ID --out "$OUT" [--rows kla,kda,llama] [--peers "fla gated-deltanet"]
#
#   --commit ID      commit for the rows, since git is not there
#   --out DIR        folder for results.jsonl, report.md and logs
#   --rows NAMES     models that are compiled and timed, beside llama
#   --peers NAMES    models of flash-linear-attention that are timed in eager mode. They tune their kernels in the first
#                    step, which takes up to four minutes of a process that nothing else waits for
#   --finite NAMES   models that take 100 steps with one sequence, to see whether they stay finite
#   --gpus N         GPUs. Peers and finite steps use the last one; the others compile and time. Default: all
#   --limit SECONDS  time of this call; default 585
#   --python FILE    Python; default python3
#   --wheels DIR     wheels of packages that the machine lacks; default .whl, if it exists
#   --site FILE      archive (.tar.xz) of a site folder with flash-linear-attention, if the machine lacks it
#   --preset NAME    default paper
#
# Three stages: compile the models (nothing is timed); time compiled steps; time eager steps, one model after another.
# Processes that are timed have cores of their own.
set -uo pipefail
commit=unknown out='' rows=kla,bayesian,gated-deltanet,kda peers='' finite='' gpus=$(nvidia-smi -L 2> /dev/null | wc -l) limit=585
python=python3 wheels=.whl site='' preset=paper
while [ $# -gt 0 ]; do
  case $1 in
    --commit | --out | --rows | --peers | --finite | --gpus | --limit | --python | --wheels | --site | --preset)
      declare "${1#--}=${2:?$1 needs a value}" ;;
    *) echo "error: $1 is not an option" >&2; exit 2 ;;
  esac
  shift 2
done
[ -n "$out" ] || { echo "error: --out is missing" >&2; exit 2; }
cd "$(dirname "$0")/.." || exit 2
mkdir -p "$out"
work=$(mktemp -d)
export PYTHONPATH="$work/site:$PWD/src:$PWD/bench/src" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 COLUMNS=150
say() { echo "[$SECONDS s] $*"; }
left() { echo $((limit - SECONDS - $1)); }
if compgen -G "$wheels/*.whl" > /dev/null; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$work/site" "$wheels"/*.whl
fi
if [ -n "$site" ]; then mkdir -p "$work/site" && tar -xJf "$site" -C "$work/site"; fi

IFS=, read -ra all <<< "$("$python" -c 'import os; print(*sorted(os.sched_getaffinity(0)), sep=",")')"
half=$(((${#all[@]} + 1) / 2))
timed=$(IFS=,; echo "${all[*]:0:$half}") others=$(IFS=,; echo "${all[*]:$((half < ${#all[@]} ? half : 0))}")
compilers=0 last=0
if [ "$gpus" = 0 ]; then compilers=cpu last=cpu; fi
if [ "$gpus" -gt 1 ]; then last=$((gpus - 1)) compilers=$(seq -s, 0 $((gpus - 2))); fi
models() { "$python" -c "from kalmix_bench.cli import app; app()" perf models --preset "$preset" "$@"; }
aside() { # name, then arguments of `models`: with a lock of its own, so that timed processes do not wait for it
  local name=$1
  shift
  mkdir -p "$work/$name"
  TMPDIR="$work/$name" timeout -k 5 "$(left 8)" taskset -c "$others" "$python" -c "from kalmix_bench.cli import app; app()" \
    perf models --preset "$preset" --devices "$last" "$@" > "$out/$name.log" 2>&1
  say "$name: exit status $?"
}

tuning=''
if [ -n "$peers" ]; then
  aside tuning --prepare --modes eager --rows "$peers" --output "$work/tuned" --deadline "$(left 200)" & tuning=$!
fi
models --prepare --modes compiled --rows "$rows,llama" --devices "$compilers" --jobs-per-device 3 --deadline "$(left 330)" \
  --output "$work/prepared" > "$out/prepare.log" 2>&1
say "prepared: exit status $?"
checking=''
if [ -n "$finite" ]; then
  aside finite --modes eager --rows "$finite" --steps 100 --batch-size 1 --deadline "$(left 20)" --output "$out/finite" & checking=$!
fi
export -f models
export python preset
run() { # log, then arguments: on the cores for timed processes
  local log=$1
  shift
  taskset -c "$timed" bash -c 'models "$@"' models "$@" --output "$out" > "$out/$log.log" 2>&1
  say "$log: exit status $?"
  grep -E "tokens/s,|failed|too slow" "$out/$log.log" | cut -c1-140
}
run compiled --modes compiled --rows "$rows,llama" --devices "$compilers" --jobs-per-device 2 --deadline "$(left 130)"
if [ -n "$tuning" ]; then wait "$tuning"; fi
run eager --modes eager --rows "$rows,llama${peers:+,$peers}" --devices "${compilers%%,*}" --deadline "$(left 15)"
if [ -n "$checking" ]; then wait "$checking"; fi
for file in "$out"/results.jsonl "$out"/finite/results.jsonl; do
  if [ -f "$file" ]; then sed -i -E "s/\"commit\": \"[^\"]*\"/\"commit\": \"$commit\"/" "$file"; fi
done
rm -rf "$work"
say end
