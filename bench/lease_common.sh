# Functions of scripts for machines that are lent. The caller has set `python`, `work` and `wheels`.

install_wheels() {  # packages that the machine lacks go to $work/site, once
  if compgen -G "$wheels/*.whl" > /dev/null && [ ! -d "$work/site" ]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$work/site" "$wheels"/*.whl
  fi
}

sharing=false
share() {  # let several processes use a GPU at once, if that works here
  unset CUDA_MPS_PIPE_DIRECTORY
  if command -v nvidia-cuda-mps-control > /dev/null && nvidia-cuda-mps-control -d 2> /dev/null; then
    sharing=true
    if timeout 40 "$python" -c "import torch; [torch.zeros(1, device=n) for n in range(torch.cuda.device_count())]"; then
      return
    fi
    stop_sharing
  fi
  echo "the multi-process service does not work; processes take turns"
}

stop_sharing() {
  if $sharing; then
    unset CUDA_MPS_PIPE_DIRECTORY
    echo quit | timeout 10 nvidia-cuda-mps-control > /dev/null 2>&1 || true
    sharing=false
  fi
}
