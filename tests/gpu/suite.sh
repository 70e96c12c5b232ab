#!/usr/bin/env bash
# Run the whole test suite, slow tests too, on CPU cores with Triton's interpreter. LIMIT=240 WORKERS=40
source "$(dirname "$0")/common.sh"
LIMIT=${LIMIT:-240} WORKERS=${WORKERS:-40}
taskset -cp "0-$(($(nproc --all) - 1))" $$ > /dev/null 2>&1 # a job may begin on a part of the cores
export CUDA_VISIBLE_DEVICES='' SHORT_PER_LONG=30

left_out=()
leave_out() { # a package, then the tests that need it
  "$PYTHON" -c "import $1" 2> /dev/null && return
  echo "suite: $1 is not installed; left out: ${*:2}"
  left_out+=("${@:2}")
}
leave_out hatchling --ignore=tests/test_wheel.py
leave_out grimp --ignore=tests/test_structure.py --ignore=tests/test_packages.py
leave_out datasets --ignore=tests/evaluation --ignore=tests/test_evaluation.py --ignore=tests/clients/test_trainer.py \
  --ignore=tests/training/shards/test_preparation.py
run_tests suite "${left_out[@]}" tests bench/tests "$@"
