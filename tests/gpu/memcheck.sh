#!/usr/bin/env bash
# Run all kernels of ops, fused parts and steps under compute-sanitizer on all visible GPUs.
# LIMIT=262 JOBS=11 SHARES=5 CHECKER="..."
# Each share of the tests runs once without the checker, to compile its kernels, because compilers can hang under it.
source "$(dirname "$0")/common.sh"
LIMIT=${LIMIT:-262} JOBS=${JOBS:-11} SHARES=${SHARES:-5}
CHECKER=${CHECKER-compute-sanitizer --tool memcheck --error-exitcode 9}
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
end=$((SECONDS + LIMIT))
IFS=, read -ra gpus <<< "${CUDA_VISIBLE_DEVICES:-$("$PYTHON" -c 'import torch; print(*range(max(1, torch.cuda.device_count())), sep=",")')}"
files=(tests/ops/test_attend_radial_triton.py tests/layers/fused tests/ops/test_steps.py tests/ops/test_tile_tables.py tests/layers/test_step.py)
few="not eager and not compil and not meta and not wrong and not refuse and not shape1 and not dtype3 and not second
  and not transforms and not logits_are_not_kept and not target_outside and not conflict"
few=${few//$'\n'/ } # without tests that launch no kernel, or the kernels of another test
export EXCLUDE='[-[]torch[]-]|test_recompute|test_layers_agree_on_both_forms|test_models_agree_on_both_forms|test_a_server_agrees_with_each_sequence_alone|test_a_step_reads_nothing|test_a_slot_has|test_prefilled_states|precision_of_extreme_numbers.eager|chunks_are_bounded'

check_ops() {
  timeout -k 5 "$LIMIT" "$PYTHON" -m kalmix_bench.perf.memcheck --jobs "$JOBS" --seconds $((LIMIT * 6 / 10)) > "$OUT/memcheck.log" 2>&1
  local status=$?
  echo "ops: exit status $status"
  grep -E 'exit codes|^share|ERROR SUMMARY|out of time' "$OUT/memcheck.log" | sort | uniq -c | cut -c1-400
  grep -E '^=========  *(Invalid|Program hit|Address|at |Saved)' "$OUT/memcheck.log" | sort | uniq -c | sort -rn | head -12 | cut -c1-200
  return $status
}

check_tests() { # index of the share, then arguments of pytest
  local tag=parts$1
  export SHARE=$1/$SHARES CUDA_VISIBLE_DEVICES=${gpus[$1 % ${#gpus[@]}]}
  shift
  TAG=$tag-compiled timeout -k 5 $((end - SECONDS)) "${PYTEST[@]}" --maxfail 6 "${files[@]}" -k "$few" "$@" > "$OUT/$tag-compiled.log" 2>&1
  echo "$tag without checker: exit status $?, $((end - SECONDS)) s left; $(grep ' END:' "$OUT/$tag-compiled.log")"
  TAG=$tag-checked timeout -k 5 $((end - SECONDS)) $CHECKER "${PYTEST[@]}" --maxfail 6 "${files[@]}" -k "$few" "$@" > "$OUT/$tag-checked.log" 2>&1
  local status=$?
  echo "$tag with checker: exit status $status (9: errors); $(grep -E ' END:|ERROR SUMMARY' "$OUT/$tag-checked.log" | tr '\n' ' ')"
  grep -E '^========= (Invalid|Program hit)|FAILED' "$OUT/$tag-checked.log" | sort | uniq -c | sort -rn | head -6 | cut -c1-200
  return $status
}

check_ops & jobs=($!)
for ((i = 0; i < SHARES; i++)); do
  check_tests $i "$@" & jobs+=($!)
done
status=0
for job in "${jobs[@]}"; do wait "$job" || status=1; done
exit $status
