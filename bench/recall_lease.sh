#!/usr/bin/env bash
# Run cells of `kalmix bench mad`, `mqar`, `a5` and `needle` on a machine without a network that is lent for a limited time.
#
#     bash bench/recall_lease.sh --commit ID --out "$OUT" --jobs-per-device 8 -- campaign
#     bash bench/recall_lease.sh --commit ID --out "$OUT" -- mad --preset paper --layer kla -- cells.jsonl
#
# Behind each -- are cells: `campaign` and options of `kalmix_bench.experiments.recall.campaign`, a command of `kalmix
# bench` that gives cells, or a cell file (*.jsonl). They run in this order, several at a time. Repeat the call on the
# same machine: it continues, also cells that the time ended. In the last call, `campaign --last WORK/run` begins no cell
# that would not end. Half of the cores draw the tasks' rows at the beginning of a call; cells read them from files.
#   --commit ID          commit for the rows, since git is not there
#   --out DIR            folder for results.jsonl, report and figures; unfinished.jsonl has the scores so far of cells that
#                        the time ended
#   --jobs-per-device N  cells at a time on each GPU, by NVIDIA's multi-process service where it works; default 1
#   --devices LIST       GPUs, or cpu; default all
#   --work DIR           folder on this machine for cells, rows, checkpoints and data; default /tmp/kalmix-recall
#   --rows DIR           folder with the results.jsonl of earlier machines, whose cells do not run again; repeatable;
#                        default bench/results/recall
#   --tf32               round operands of matrix products to TF32: faster; rows say so
#   --limit SECONDS      time of this call; default 585
#   --python FILE        Python; default python3
#   --wheels DIR         wheels of packages that the machine lacks; default .gpu/whl, if it exists
# MAD's cells of Mamba-1 and mLSTM, the last ones of `campaign`, need two wheels (130 KiB). Without them they are skipped.
# Download them beforehand, for Python 3.12:
#     python3 -m pip download --no-deps --python-version 3.12 --only-binary=:all: -d .gpu/whl mambapy==1.2.0 xlstm==2.0.6
# Paths are absolute, or relative to the repository.
# Exit status: 0 if all cells are finished, 3 if cells are left, 1 if a cell failed, 2 for a wrong call.
set -euo pipefail
commit=unknown out='' jobs_per_device=1 devices='' work=/tmp/kalmix-recall limit=585 python=python3 wheels=.gpu/whl
rows=() tf32=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  case $1 in
    --tf32)
      tf32=(--tf32)
      shift
      continue ;;
    --rows) rows+=("${2:?$1 needs a value}") ;;
    --commit | --out | --jobs-per-device | --devices | --work | --limit | --python | --wheels)
      name=${1#--}
      declare "${name//-/_}=${2:?$1 needs a value}" ;;
    *) echo "error: $1 is not an option" >&2; exit 2 ;;
  esac
  shift 2
done
[ -n "$out" ] || { echo "error: --out is missing" >&2; exit 2; }
[ $# -gt 0 ] || { echo "error: no cells; add -- campaign, or -- and a command such as mad --preset paper" >&2; exit 2; }
cd "$(dirname "$0")/.."
mkdir -p "$work/run" "$out"
source bench/lease_common.sh
install_wheels
export PYTHONPATH="$PWD/src:$PWD/bench/src:$work/site" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 COLUMNS=150
export TORCHINDUCTOR_COMPILE_THREADS=2  # otherwise each process starts a compiler per core
bench() { "$python" -c "from kalmix_bench.cli import app; app()" "$@"; }

write_cells() {  # FILE arguments: write the cells of one --
  local file=$1
  shift
  case ${1:-} in
    campaign) "$python" -m kalmix_bench.experiments.recall.campaign "$file" "${@:2}" ;;
    *.jsonl) cp "$1" "$file" ;;
    *) bench "$@" --write "$file" ;;
  esac
}
: > "$work/cells.jsonl"
while [ $# -gt 0 ]; do
  shift  # the --
  arguments=()
  while [ $# -gt 0 ] && [ "$1" != -- ]; do
    arguments+=("$1")
    shift
  done
  write_cells "$work/part.jsonl" "${arguments[@]}" > "$work/write.log" 2>&1 || { cat "$work/write.log" >&2; exit 2; }
  grep "^skipped: " "$work/write.log" || true
  cat "$work/part.jsonl" >> "$work/cells.jsonl"
done
if [ ! -f "$work/run/results.jsonl" ]; then
  [ "${#rows[@]}" -gt 0 ] || rows=(bench/results/recall)
  for folder in "${rows[@]}"; do
    if [ -f "$folder/results.jsonl" ]; then cat "$folder/results.jsonl" >> "$work/run/results.jsonl"; fi
  done
fi
echo "$(wc -l < "$work/cells.jsonl") cells after $SECONDS s"

keep() { cp "$work"/run/results.jsonl "$work"/run/report.* "$work"/run/*.png "$out"/ 2> /dev/null || true; }
(while sleep 15 &> /dev/null; do keep; done) &  # a call that is killed has its rows, too; no pipe waits for `sleep`
copying=$!
setsid nice -n 5 "$python" -m kalmix_bench.experiments.recall.row_files "$work/cells.jsonl" "$work/data" \
  --jobs $((($(nproc) + 1) / 2)) > "$work/draw.log" 2>&1 &
drawing=$!
trap 'kill $copying 2> /dev/null || true; kill -- -$drawing 2> /dev/null || true; stop_sharing; keep' EXIT
if [ "$jobs_per_device" -gt 1 ] && [ "$devices" != cpu ]; then share; fi
left=$((limit - SECONDS - 20))  # the report takes time, too
[ "$left" -gt 0 ] || { echo "too little time is left in this call; repeat it"; exit 3; }
status=0
bench run "$work/cells.jsonl" ${devices:+--devices "$devices"} --jobs-per-device "$jobs_per_device" --commit "$commit" \
  --data "$work/data" --deadline "$left" "${tf32[@]}" --output "$work/run" || status=$?
"$python" -m kalmix_bench.experiments.recall.unfinished "$work/cells.jsonl" "$work/run" "$out/unfinished.jsonl" \
  --commit "$commit" "${tf32[@]}" || true
echo "ended with status $status after $SECONDS s"
exit "$status"
