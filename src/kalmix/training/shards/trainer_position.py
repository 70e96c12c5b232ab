"""Callback that stores the position of a loader in the checkpoints of the Hugging Face Trainer."""

from __future__ import annotations

from typing import Any

from kalmix._extras import optional_imports

with optional_imports():
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState

from kalmix.errors import ArgumentError
from kalmix.training.shards.loader import TokenLoader


class DataPosition(TrainerCallback, ExportableState):
    """Callback that stores the position of a `TokenLoader` in each checkpoint, and restores it when training resumes.

    `Trainer.get_train_dataloader` must return the loader. The arguments of training need `ignore_data_skip=True`: the
    loader goes to its position at once, without reading what is before it. `epoch` in the log is the fraction of
    `max_steps` that is done, since the loader has no length.

    Args:
        loader: loader of the training batches.

    Raises:
        ArgumentError: on resuming, without `ignore_data_skip`, or if the position belongs to other data.

    Example:
        >>> from pathlib import Path
        >>> from kalmix.training.shards import Order, Preparation, TokenLoader, prepare
        >>> from kalmix.training.shards.trainer_position import DataPosition
        >>> Path("corpus").mkdir()
        >>> for n in range(50):
        ...     _ = Path(f"corpus/{n}.txt").write_text(f"Document {n}.")
        >>> _ = prepare(Preparation("corpus", vocab_size=257, held_out=0), "shards")
        >>> loader = TokenLoader("shards", Order(seq_len=64), batch_size=2)
        >>> callback = DataPosition(loader)  # Trainer(..., callbacks=[callback])
        >>> callback.state()["attributes"]["position"] == loader.state_dict()
        True
    """

    def __init__(self, loader: TokenLoader) -> None:
        self.loader: TokenLoader = loader

    def state(self) -> dict[str, Any]:
        """Return the position as the Trainer stores it in trainer_state.json."""
        return {"args": {}, "attributes": {"position": self.loader.state_dict()}}

    @staticmethod
    def at_start() -> dict[str, Any]:
        """Return what a checkpoint stores instead if training is to resume at the start of other data."""
        return {"args": {}, "attributes": {"position": None}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Restore the position of the checkpoint from which training resumes, if there is one."""
        callbacks: Any = state.stateful_callbacks
        stored = callbacks.get(type(self).__name__) if state.global_step and isinstance(callbacks, dict) else None
        if stored is None:
            return
        if not args.ignore_data_skip:
            raise ArgumentError("ignore_data_skip", got=False, expected="True, since the loader restores its position")
        stored = stored[-1] if isinstance(stored, list) else stored
        position = stored["attributes"]["position"]
        if position is not None:
            self.loader.load_state_dict(position)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Set `epoch` of the log, for which the Trainer counts the steps of the present session only."""
        state.epoch = state.global_step / state.max_steps
