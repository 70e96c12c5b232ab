#!/usr/bin/env bash
# Run the tests of ops, fused parts and steps with tensors on one GPU, and captured decoding. LIMIT=262 WORKERS=18
source "$(dirname "$0")/common.sh"
LIMIT=${LIMIT:-262} WORKERS=${WORKERS:-18}
export SHORT_PER_LONG=5
compile=tests/layers/test_compile.py
on_gpu=$(grep -lE 'DEVICE|"cuda"' tests/ops/test_*.py tests/layers/test_*.py |
  grep -vE "bad_input|$compile|test_attention.py|attend_launches") # those run no kernel on a GPU, apart from two tests
(
  sleep 2 # pytest begins first, since it takes longer
  timeout "$LIMIT" "$PYTHON" "$HERE/captured_decoding.py" > "$OUT/captured.log" 2>&1
  status=$?
  tail -40 "$OUT/captured.log" | sed 's/^/captured: /'
  exit $status
) &
captured=$!
run_tests ops $on_gpu tests/layers/fused tests/testing/test_attend_budget.py \
  $compile::test_two_graphs_serve_training_with_triton_at_all_lengths $compile::test_export_with_triton_adds_no_guard \
  --deselect tests/ops/test_dense_noise.py::test_smallest_noise_is_within_the_error_budget \
  --deselect tests/layers/test_step.py::test_a_server_agrees_with_each_sequence_alone "$@" # these two run on CPUs
status=$?
wait $captured || status=1
exit $status
