"""Trainer whose checkpoints are complete or absent, even if the process is killed.

A checkpoint is written into the folder `unfinished` and renamed to `checkpoint-N` after all of it is on disk. Deletion
does the same in reverse. So a folder `checkpoint-N` is complete, unless something else damages it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import TrainOutput

from kalmix.files import disk_errors, sync, sync_tree
from kalmix.training.checkpoints import checkpoint_step, list_checkpoints, write_manifest
from kalmix.training.recipe import Recipe

UNFINISHED_FOLDER = "unfinished"


class SafeTrainer(Trainer):
    """Hugging Face Trainer that saves complete checkpoints only, and uses one GPU a process.

    Args:
        args: settings.
        options: other arguments of the Trainer.

    Attributes:
        inputs: digests of the data of the run, by name; stored in the manifest of each checkpoint.
        settings: settings of the run, stored there, too; `None` for a run without a `Recipe`.
        keep_steps: checkpoints of multiples of so many steps are not deleted; `None` for none.
    """

    inputs: dict[str, str]
    settings: Recipe | None = None
    keep_steps: int | None = None
    _saving = False

    def __init__(self, *, args: TrainingArguments, **options: Any) -> None:
        # Without torchrun, the Trainer would divide each batch among all GPUs by `nn.DataParallel`.
        args._n_gpu = min(args.n_gpu, 1)
        super().__init__(args=args, **options)

    def train_from(self, checkpoint: Path | None) -> TrainOutput:
        """Train from a checkpoint, or from the beginning if it is `None`. Newer checkpoints, which are damaged, are
        deleted."""
        if self.args.should_save:
            after = -1 if checkpoint is None else checkpoint_step(checkpoint)
            self._discard(path for path in list_checkpoints(self._folder) if checkpoint_step(path) > after)
        return self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))

    def _run_epoch(self, *args: Any, **options: Any) -> None:
        """Train an epoch; end the run if the checkpoint to resume from was saved after the last step."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **options)

    @property
    def _folder(self) -> Path:
        return Path(str(self.args.output_dir))

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return str(Path(folder) / UNFINISHED_FOLDER) if self._saving else folder

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.args.should_save:
            shutil.rmtree(self._folder / UNFINISHED_FOLDER, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        with disk_errors(self._folder):
            self._saving = True
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._saving = False
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self._publish()
        self.accelerator.wait_for_everyone()

    def _publish(self) -> None:
        """Complete the unfinished checkpoint, and delete the oldest ones beyond `save_total_limit`."""
        (checkpoint,) = list_checkpoints(self._folder / UNFINISHED_FOLDER)
        processes = self.args.world_size
        rows = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        write_manifest(checkpoint, processes, processes * rows, self.inputs, self.settings)
        sync_tree(checkpoint)
        checkpoint.rename(self._folder / checkpoint.name)
        sync(self._folder)
        found, keep = list_checkpoints(self._folder), self.keep_steps
        passing = [path for path in found if keep is None or checkpoint_step(path) % keep]
        self._discard(passing[self.args.save_total_limit :])

    def _discard(self, checkpoints: Iterable[Path]) -> None:
        """Delete checkpoints so that no folder `checkpoint-N` is ever incomplete."""
        unfinished = self._folder / UNFINISHED_FOLDER
        for checkpoint in checkpoints:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            checkpoint.rename(unfinished / checkpoint.name)
        shutil.rmtree(unfinished, ignore_errors=True)
