#!/usr/bin/env bash
# Time pretraining from shards, 340M parameters, on one GPU and on all, beside Llama and flash-linear-attention (fla), on
# a machine with several GPUs and without a network that is lent for ten minutes. Run it from the root of the repository:
#
#     O=$OUT COMMIT=ID bash bench/pretraining_lease.sh
#
# Leaves $O/pretraining.jsonl, with a row per model, mode and number of GPUs, and $O/pretraining.log.
# 1. On one GPU each: every free GPU takes the next row of the list `single`. None begins later than ALONE - 15 seconds.
# 2. On all GPUs, one after the other: gated-deltanet, llama, kla, fla gated-deltanet.
# fla tunes its kernels in its first step, which took 205 s on an H200. Stage 2 finds the results in Triton's cache.
# CARRIED (default .gpu) has what the machine lacks: whl/*.whl, fla.txz (fla-core, flash-linear-attention and tilelang,
# installed by `pip install --target`), and language/pieces of `kalmix_bench.datasets.corpus_pieces`.
# LIMIT=580, ALONE=310 (end of stage 1), STEPS=200 and PRESET=paper can be changed.
set -uo pipefail
: "${O:?set O to the output folder}"
carried=${CARRIED:-.gpu}
python=${PYTHON:-python3} work=${WORK:-/tmp/kalmix-language} limit=${LIMIT:-580} steps=${STEPS:-200} preset=${PRESET:-paper}
alone=${ALONE:-310} all=${ALL:-$(nvidia-smi -L 2> /dev/null | wc -l)} peer=${PEER:-fla gated-deltanet} site=${SITE:-/tmp/site}
[ "$all" -gt 0 ] || { echo "error: there is no GPU" >&2; exit 2; }
mkdir -p "$O" "$work/text"
exec > >(tee "$O/pretraining.log") 2>&1
export PYTHONPATH="$PWD/src:$PWD/bench/src:$site" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=4
left() { echo $((limit - SECONDS)); }
least() { echo $(($1 < $2 ? $1 : $2)); }
if ! "$python" -c "import typer, rich" 2> /dev/null && compgen -G "$carried/whl/*.whl" > /dev/null; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$carried"/whl/*.whl
fi
if [ -f "$carried/fla.txz" ] && [ ! -d "$site/fla" ]; then
  mkdir -p "$site" && tar -xJf "$carried/fla.txz" -C "$site"
fi
if [ ! -f "$work/shards/manifest.json" ]; then  # synthetic text, unless a piece of the corpus is here
  shards=$work/timing-shards
  if [ -f "$carried/language/pieces/text/00.jsonl.xz" ]; then
    xz -dc "$carried/language/pieces/text/00.jsonl.xz" > "$work/text/00.jsonl"
    source=$work/text
  else
    source=$work/timing-text
    mkdir -p "$source"
    "$python" -c "
import sys
from pathlib import Path
from kalmix_bench.perf.token_shards import write_text_files
write_text_files(Path(sys.argv[1]), int(float(sys.argv[2])))" "$source" "${TOKENS:-2e7}"
  fi
  timeout -k 5 120 "$python" -m kalmix.cli data prepare "$source" --tokenizer "$carried/language/pieces/tokenizer" --output "$shards" || exit 1
else
  shards=$work/shards
fi
echo "shards after $SECONDS s"

rows() { cat "$work"/timing-rows.*.jsonl > "$O/pretraining.jsonl" 2> /dev/null; }
time_model() {  # NAME MODE GPUS LIMIT: add a row
  local name=$1 mode=$2 count=$3 seconds=$4 begin=$SECONDS ended label="${1// /-}-$2-$3"
  local arguments=(--model "$name" --shards "$shards" --preset "$preset" --steps "$steps")
  arguments+=(--output "$work/timing-rows.$label.jsonl")
  [ "$mode" = eager ] || arguments+=(--compiled)
  [ -z "${COMMIT:-}" ] || arguments+=(--commit "$COMMIT")
  if [ "$seconds" -lt 45 ]; then
    echo "$name, $mode, $count GPUs: too little time is left"
    return
  fi
  if [ "$count" = 1 ]; then
    timeout -k 5 "$seconds" "$python" -m kalmix_bench.perf.pretraining "${arguments[@]}"
  else
    timeout -k 5 "$seconds" "$python" -m torch.distributed.run --standalone --nproc-per-node "$count" \
      -m kalmix_bench.perf.pretraining "${arguments[@]}"
  fi 2> "$work/timing-errors.$label"
  ended=$?
  [ "$ended" = 0 ] || tail -5 "$work/timing-errors.$label" | cut -c1-300
  echo "$name, $mode, $count GPUs: status $ended, $((SECONDS - begin)) s; after $SECONDS s"
  rows
}
# Rows on one GPU: name, mode. The peer is first, since it takes longest.
single=("$peer:eager" llama:eager gated-deltanet:eager gated-deltanet:compiled llama:compiled kla:eager kda:eager)
taken=$(mktemp -d)
trap 'rm -r "$taken"' EXIT
take_rows() {  # GPU: add rows that no other GPU has taken, one after the other
  export CUDA_VISIBLE_DEVICES=$1
  local row
  for row in "${single[@]}"; do
    mkdir "$taken/$row" 2> /dev/null || continue
    time_model "${row%:*}" "${row##*:}" 1 $((alone + 30 - SECONDS))
  done
}
waiting=()
for ((gpu = 0; gpu < all; gpu++)); do
  take_rows "$gpu" & waiting+=($!)
done
wait "${waiting[@]}"
for model in gated-deltanet llama kla "$peer"; do
  [ "$all" -gt 1 ] || break  # they are rows of stage 1
  time_model "$model" eager "$all" "$(least "$(left)" 90)"
done
rows
"$python" -m kalmix_bench.perf.pretraining --report --output "$O/pretraining.jsonl"
echo "ended after $SECONDS s"
