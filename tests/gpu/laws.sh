#!/usr/bin/env bash
# Run the laws of all kernels on one GPU, in float32 and bfloat16. LIMIT=262 WORKERS=18
source "$(dirname "$0")/common.sh"
LIMIT=${LIMIT:-262} WORKERS=${WORKERS:-18}
export SHORT_PER_LONG=8
export EXCLUDE=${EXCLUDE-'bfloat16-(compiles|half_precision)'} # these run once, in float32
run_tests laws -p laws_on_gpu tests/laws/test_laws.py "$@"
