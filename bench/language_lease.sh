#!/usr/bin/env bash
# Run `kalmix bench language` on a machine without a network that is lent for a limited time.
#
#     bash bench/language_lease.sh --commit ID --out "$OUT" -- --preset paper --stage tune --jobs-per-device 3
#
# Repeat the command on the same machine: it continues. What is behind -- goes to `kalmix bench language`.
#   --commit ID      commit for the rows, since git is not there
#   --out DIR        folder for results.jsonl, report.md, report.csv and figures
#   --pieces DIR     pieces of the corpus (`kalmix_bench.datasets.corpus_pieces`); default runs/pieces
#   --work DIR       folder on this machine for corpus, shards, rows and checkpoints; default /tmp/kalmix-language
#   --rows DIR       folder with the results.jsonl of earlier machines; default bench/results/language
#   --limit SECONDS  time of this call; default 585
#   --python FILE    Python; default python3
#   --wheels DIR     wheels of packages that the machine lacks; default .whl, if it exists
# Paths are absolute, or relative to the repository. A call may bring one piece of several: the first calls store theirs and
# end, until all are there.
# Exit status: 0 if all cells are finished, 3 if cells are left or pieces are missing, 1 if a cell failed, 2 for a wrong command.
set -euo pipefail
commit=unknown out='' pieces=runs/pieces work=/tmp/kalmix-language rows=bench/results/language limit=585 python=python3 wheels=.whl
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  case $1 in
    --commit | --out | --pieces | --work | --rows | --limit | --python | --wheels) declare "${1#--}=${2:?$1 needs a value}" ;;
    *) echo "error: $1 is not an option" >&2; exit 2 ;;
  esac
  shift 2
done
[ $# -gt 0 ] && shift
[ -n "$out" ] || { echo "error: --out is missing" >&2; exit 2; }
cd "$(dirname "$0")/.."
mkdir -p "$work/packed" "$work/text" "$work/run" "$out"

export PYTHONPATH="$PWD/src:$PWD/bench/src:$work/site" HF_HUB_OFFLINE=1
if compgen -G "$wheels/*.whl" > /dev/null && [ ! -d "$work/site" ]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$work/site" "$wheels"/*.whl
fi

for name in pieces.json tokenizer; do
  if [ -e "$pieces/$name" ]; then cp -r "$pieces/$name" "$work/"; fi
done
for piece in "$pieces"/text/*.xz; do
  if [ -f "$piece" ]; then cp -n "$piece" "$work/packed/"; fi
done
[ -f "$work/pieces.json" ] || { echo "error: $pieces has no pieces.json" >&2; exit 2; }
needed=$(grep -oE '[0-9]+' "$work/pieces.json" | head -1)
found=$(find "$work/packed" -name '*.xz' | wc -l)
if [ "$found" -lt "$needed" ]; then
  echo "$found of $needed pieces are here; the next call brings another"
  exit 3
fi
for piece in "$work"/packed/*.xz; do  # plain JSON lines are tokenised by all cores
  text="$work/text/$(basename "$piece" .xz)"
  [ -f "$text" ] || "$python" -c "
import lzma, os, shutil, sys
with lzma.open(sys.argv[1]) as packed, open(sys.argv[2] + '.part', 'wb') as plain:
    shutil.copyfileobj(packed, plain, 1 << 22)
os.rename(sys.argv[2] + '.part', sys.argv[2])" "$piece" "$text" &
done
wait
[ "$(find "$work/text" -name '*.jsonl' | wc -l)" = "$needed" ] || { echo "error: a piece is damaged" >&2; exit 2; }
"$python" -m kalmix.cli data prepare "$work/text" --tokenizer "$work/tokenizer" --held-out 0.01 --output "$work/shards"

if [ ! -f "$work/run/results.jsonl" ] && [ -f "$rows/results.jsonl" ]; then cp "$rows/results.jsonl" "$work/run/"; fi
if [[ " $* " == *" --jobs-per-device "* ]] && command -v nvidia-cuda-mps-control > /dev/null; then
  nvidia-cuda-mps-control -d || true  # fails if it runs already
fi
keep() { cp "$work"/run/results.jsonl "$work"/run/report.* "$work"/run/*.svg "$out"/ 2> /dev/null || true; }
(while sleep 15; do keep; done) &  # a call that is killed has its rows, too
copying=$!
trap 'kill $copying 2> /dev/null || true; keep' EXIT
left=$((limit - SECONDS - 25))  # starting Python and drawing the report take time, too
[ "$left" -ge 30 ] || { echo "too little time is left in this call; repeat it"; exit 3; }
"$python" -c "from kalmix_bench.cli import app; app()" language --shards "$work/shards" --output "$work/run" \
  --checkpoints "$work/checkpoints" --commit "$commit" --deadline "$left" "$@"
