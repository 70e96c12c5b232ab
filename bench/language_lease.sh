#!/usr/bin/env bash
# Run `kalmix bench language` on a machine without a network that is lent for a limited time.
#
#     bash bench/language_lease.sh --commit ID --out "$OUT" --precompile medium \
#         -- --preset medium --stage tune --jobs-per-device 4 -- --preset medium --stage main
#
# What is behind a -- goes to `kalmix bench language`; behind another -- is a further command, which runs after it. A
# command that begins with "variations" goes to `kalmix_bench.experiments.language.variations`, whose rows are in
# variations.jsonl. Repeat the call on the same machine: it continues.
#   --commit ID          commit for the rows, since git is not there
#   --out DIR            folder for results.jsonl, report.md, report.csv and figures
#   --pieces DIR         pieces of the corpus (`kalmix_bench.datasets.corpus_pieces`); default runs/pieces
#   --use N              train on the first N pieces; default all
#   --work DIR           folder on this machine for corpus, shards and rows; default /tmp/kalmix-language
#   --rows DIR           folder with the results.jsonl of earlier machines; default bench/results/language
#   --limit SECONDS      time of this call; default 585
#   --wait SECONDS       time to wait for pieces that later calls of bench/detach.sh bring; default 0
#   --precompile PRESET  compile the kernels of a preset while the corpus is tokenised: of the layers that --layer names, or of
#                        all layers if a command names none
#   --python FILE        Python; default python3
#   --wheels DIR         wheels of packages that the machine lacks; default .whl, if it exists
# Paths are absolute, or relative to the repository. A call may bring one piece of several: the first calls store theirs and
# end, until all are there. Under `bench/detach.sh`, one call trains beyond its end, and the others bring pieces and wait.
# Exit status: 0 if all cells are finished, 3 if cells are left or pieces are missing, 1 if a cell failed, 2 for a wrong call.
set -euo pipefail
commit=unknown out='' pieces=runs/pieces use='' work=/tmp/kalmix-language rows=bench/results/language limit=585
wait=0 precompile='' python=python3 wheels=.whl
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  case $1 in
    --commit | --out | --pieces | --use | --work | --rows | --limit | --wait | --precompile | --python | --wheels)
      declare "${1#--}=${2:?$1 needs a value}" ;;
    *) echo "error: $1 is not an option" >&2; exit 2 ;;
  esac
  shift 2
done
[ -n "$out" ] || { echo "error: --out is missing" >&2; exit 2; }
cd "$(dirname "$0")/.."
mkdir -p "$work/packed" "$work/text" "$work/run" "$out"

export PYTHONPATH="$PWD/src:$PWD/bench/src:$work/site" HF_HUB_OFFLINE=1
source bench/lease_common.sh
install_wheels

names=()
store() {  # copy what is here to this machine, and list the pieces
  local name piece
  for name in pieces.json tokenizer; do
    if [ -e "$pieces/$name" ]; then cp -r "$pieces/$name" "$work/"; fi
  done
  for piece in "$pieces"/text/*.xz; do
    if [ -f "$piece" ] && [ ! -f "$work/packed/${piece##*/}" ]; then cp "$piece" "$work/packed/"; fi
  done
  [ -f "$work/pieces.json" ] || { echo "error: $pieces has no pieces.json" >&2; exit 2; }
  count=$(grep -oE '[0-9]+' "$work/pieces.json" | head -1)
  names=()
  for ((n = 0; n < ${use:-$count}; n++)); do
    name=$(printf '%02d.jsonl' "$n")
    if [ -f "$work/packed/$name.xz" ]; then names+=("$name"); fi
  done
}
all_here() { [ "${#names[@]}" -ge "${use:-$count}" ]; }
leave_unless_all_here() {
  all_here || { echo "${#names[@]} of ${use:-$count} pieces are here; the next call brings another"; exit 3; }
}
store
[ "$wait" -gt 0 ] || leave_unless_all_here
named=() previous='' all_named=true
for word in "$@" --; do
  if [ "$word" = -- ]; then
    $all_named || { named=(); break; }
    all_named=false
  elif [ "$previous" = --layer ]; then
    named+=(--layer "$word")
    all_named=true
  fi
  previous=$word
done
compiled="$precompile ${named[*]}"
compiling=''
if [ -n "$precompile" ] && [ "$(cat "$work/precompiled" 2> /dev/null)" != "$compiled" ]; then
  echo "$compiled" > "$work/precompiled"
  "$python" -m kalmix_bench.experiments.language.precompile --preset "$precompile" "${named[@]}" > "$out/precompile.log" 2>&1 &
  compiling=$!
fi
until all_here || [ "$SECONDS" -ge "$wait" ]; do
  sleep 1
  store
done
leave_unless_all_here
unpacking=()
for name in "${names[@]}"; do  # plain JSON lines are tokenised by all cores
  [ -f "$work/text/$name" ] || "$python" -c "
import lzma, os, shutil, sys
with lzma.open(sys.argv[1]) as packed, open(sys.argv[2] + '.part', 'wb') as plain:
    shutil.copyfileobj(packed, plain, 1 << 22)
os.rename(sys.argv[2] + '.part', sys.argv[2])" "$work/packed/$name.xz" "$work/text/$name" &
  unpacking+=($!)
done
for process in "${unpacking[@]}"; do
  wait "$process" || { echo "error: a piece is damaged" >&2; exit 2; }
done
"$python" -m kalmix.cli data prepare "$work/text" --tokenizer "$work/tokenizer" --held-out 0.01 --output "$work/shards"
echo "shards after $SECONDS s"
if [ -n "$compiling" ]; then  # until then it needs memory of the GPUs
  wait "$compiling" || echo "some kernels were not precompiled; see precompile.log"
  echo "kernels after $SECONDS s"
fi

if [ ! -f "$work/run/results.jsonl" ] && [ -f "$rows/results.jsonl" ]; then cp "$rows/results.jsonl" "$work/run/"; fi
checkpoints="$work/checkpoints"
memory=$(df --output=avail -k /dev/shm 2> /dev/null | tail -1 || true)
if [ "${memory:-0}" -gt $((12 << 20)) ]; then checkpoints="/dev/shm$work/checkpoints"; fi  # in memory, for speed
keep() { cp "$work"/run/{results,variations}.jsonl "$work"/run/report.* "$work"/run/*.svg "$out"/ 2> /dev/null || true; }
(while sleep 15 &> /dev/null; do keep; done) &  # a call that is killed has its rows, too; no pipe waits for `sleep`
copying=$!
trap 'kill $copying 2> /dev/null || true; stop_sharing; keep' EXIT
status=0
run() {  # one command
  local left=$((limit - SECONDS - 25)) ended=0  # starting Python and drawing the report take time, too
  if [ "$left" -lt 30 ]; then
    echo "too little time is left in this call; repeat it"
    ended=3
  elif [ "${1:-}" = variations ]; then
    timeout "$left" "$python" -m kalmix_bench.experiments.language.variations --shards "$work/shards" \
      --output "$work/run/variations.jsonl" --commit "$commit" "${@:2}" || ended=$?
    [ "$ended" != 124 ] || ended=3
  else
    case " $* " in *" --jobs-per-device "*) share ;; esac
    if $sharing; then unset CUDA_MPS_PIPE_DIRECTORY; else export CUDA_MPS_PIPE_DIRECTORY="$work/no-sharing"; fi
    "$python" -c "from kalmix_bench.cli import app; app()" language --shards "$work/shards" --output "$work/run" \
      --checkpoints "$checkpoints" --commit "$commit" --deadline "$left" "$@" || ended=$?
    stop_sharing
  fi
  case $ended in
    0) ;;
    3) [ "$status" != 0 ] || status=3 ;;
    *) status=1 ;;
  esac
  echo "ended with status $ended after $SECONDS s: $*"
}
while [ $# -gt 0 ]; do
  shift  # the --
  arguments=()
  while [ $# -gt 0 ] && [ "$1" != -- ]; do
    arguments+=("$1")
    shift
  done
  run "${arguments[@]}"
done
exit "$status"
