# Folders, environment and the pytest command. The scripts of this folder source it.
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$HERE/../.." || exit 2
OUT=${OUT:-build/gpu}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
PYTHON=${PYTHON:-python3}
export OUT HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
export PYTHONPATH=$PWD/src:$PWD/bench/src:$HERE${PYTHONPATH:+:$PYTHONPATH}
PYTEST=("$PYTHON" -m pytest -o addopts= -q --strict-markers -p time_limit -p no:cacheprovider -p no:benchmark --disable-warnings
  --tb=short --show-capture=no --no-summary -m "slow or not slow")

without_dots() { # of the progress and of pytest's plugins
  grep --line-buffered -v -E '^[.sFExX]*( *\[ *[0-9]+%\])?$|^bringing up|^$|pytest_benchmark|warner\(|Pluggy|^Plugin:|^OSError|^For more inf|hook\.pytest_session'
}

run_tests() { # name of the run, then arguments of pytest; uses LIMIT and WORKERS
  export TAG=$1
  shift
  if [ -f "$OUT/$TAG-durations.jsonl" ]; then cp "$OUT/$TAG-durations.jsonl" "$OUT/$TAG-earlier.jsonl"; fi
  timeout --foreground -k 8 "$LIMIT" "${PYTEST[@]}" -n "$WORKERS" --dist load --maxschedchunk 1 "$@" 2>&1 |
    tee "$OUT/$TAG.log" | without_dots
  return "${PIPESTATUS[0]}"
}
