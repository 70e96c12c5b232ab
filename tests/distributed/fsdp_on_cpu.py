"""FSDP2 of the Trainer on CPUs, which accelerate has for accelerators only."""

from __future__ import annotations

from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import Trainer

from kalmix.training import trainer


def allow_fsdp_on_cpu() -> None:
    """Let recipes with `fsdp` train on CPUs, in this process."""
    postprocess = Trainer.create_accelerator_and_postprocess

    def with_fsdp(self: Trainer) -> None:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        postprocess(self)
        assert self.accelerator.is_fsdp2

    Trainer.create_accelerator_and_postprocess = with_fsdp
    trainer.has_fsdp = lambda: True
