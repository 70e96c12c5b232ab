#!/usr/bin/env bash
# Run a command on a lent machine beyond the call that starts it. Later calls wait for it and bring back what it has written.
#
#     bash bench/detach.sh --out "$OUT" --results /tmp/out -- \
#         bash bench/recall_lease.sh --commit ID --out /tmp/out --limit 1650 -- campaign
#
# The first call copies the working tree and starts the command in the copy, because each call replaces the working tree.
# Repeat the call on the same machine, without the command if you like, until the status is not 75.
#   --out DIR        folder that comes back from the machine; gets results.tgz and log.txt
#   --results DIR    folder that the command writes
#   --bring DIR      folder of this call's working tree that is added to the copy; repeatable
#   --limit SECONDS  time of this call; default 585
#   --work DIR       folder for the copy and the log; default /tmp/kalmix-detached
# Exit status: that of the command, or 75 if it still runs; 2 for a wrong call.
set -euo pipefail
out='' results='' limit=585 work=/tmp/kalmix-detached
brought=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  case $1 in
    --bring) brought+=("${2:?$1 needs a value}") ;;
    --out | --results | --limit | --work) declare "${1#--}=${2:?$1 needs a value}" ;;
    *) echo "error: $1 is not an option" >&2; exit 2 ;;
  esac
  shift 2
done
[ -n "$out" ] || { echo "error: --out is missing" >&2; exit 2; }
[ "${1:-}" != -- ] || shift
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.."
if [ ! -d "$work/tree" ]; then
  [ $# -gt 0 ] || { echo "error: no command; add -- and a command" >&2; exit 2; }
  rm -rf "$work"
  mkdir -p "$work/tree.part"
  tar -cf - --exclude .git --exclude .venv . | tar -xf - -C "$work/tree.part"
  mv "$work/tree.part" "$work/tree"
  setsid nohup bash -c 'cd "$1/tree"; status=0; "${@:2}" || status=$?; echo $status > "$1/ended.part"; mv "$1/ended.part" "$1/ended"' \
    detached "$work" "$@" > "$work/log.txt" 2>&1 < /dev/null &
fi
for folder in "${brought[@]}"; do  # a file has its name only when it is whole
  find "$folder" -type f -printf '%P\n' | while read -r file; do
    target=$work/tree/$folder/$file
    if [ ! -f "$target" ]; then
      mkdir -p "$(dirname "$target")"
      cp "$folder/$file" "$target.part"
      mv "$target.part" "$target"
    fi
  done
done
keep() {
  cp "$work/log.txt" "$out/" 2> /dev/null || true
  if [ -n "$results" ] && [ -d "$results" ]; then
    tar -czf "$work/results.tgz" -C "$results" . 2> /dev/null || [ $? -eq 1 ] || return 0  # 1: a file grew
    cp "$work/results.tgz" "$out/"
  fi
}
last=0
while [ ! -f "$work/ended" ] && [ "$SECONDS" -lt "$limit" ]; do
  sleep 1
  if [ $((SECONDS - last)) -ge 20 ]; then last=$SECONDS; keep; fi
done
keep
tr '\r' '\n' < "$work/log.txt" | cut -c1-300 | tail -n 60
[ -f "$work/ended" ] || { echo "it still runs; repeat the call"; exit 75; }
exit "$(cat "$work/ended")"
