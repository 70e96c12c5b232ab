"""Training of an image classifier, and the files of a run.

output/recipe.json: the recipe. output/model.safetensors: weights, read by `load`. output/history.json: losses and
accuracies. output/checkpoints/: checkpoints to resume from, until the run ends.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import broadcast_object_list
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, TrainerCallback, TrainingArguments, set_seed

from kalmix.errors import ArgumentError, FileError
from kalmix.files import disk_errors, lock_folder, replace_file, write_text
from kalmix.layers import mixer_class
from kalmix.models.folder import check_finite, check_weights, read_headers
from kalmix.models.optimizer import optimizer_groups
from kalmix.models.vision.model import VisionModel, gated_kalmanet
from kalmix.training.checkpoints import list_checkpoints, newest_checkpoint
from kalmix.training.saving import SafeTrainer
from kalmix.training.trainer import process_state
from kalmix_bench.experiments.vision import data as vision_data
from kalmix_bench.experiments.vision.recipe import HISTORY, WEIGHTS, VisionRecipe
from kalmix_bench.runner.experiment import CellStopped, ProgressFn


@dataclass(frozen=True)
class VisionRun:
    """Finished run.

    Attributes:
        recipe: recipe of the run.
        model: trained model.
        accuracy: final accuracy on the test images.
        seconds: training time of this session.
        history: the Trainer's log.
    """

    recipe: VisionRecipe
    model: VisionModel
    accuracy: float
    seconds: float
    history: list[dict[str, float]]


class ProgressCallback(TrainerCallback):
    """Callback that reports each epoch after its checkpoint is stored, and stops the run if requested."""

    def __init__(self, recipe: VisionRecipe, on_progress: ProgressFn) -> None:
        self.recipe, self.on_progress = recipe, on_progress

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        accuracy = next(row["eval_accuracy"] for row in reversed(state.log_history) if "eval_accuracy" in row)
        stop = self.on_progress(state.epoch / self.recipe.total_epochs, f"accuracy {accuracy:.1%}")
        if stop and state.global_step < state.max_steps:
            raise CellStopped


def train(
    recipe: VisionRecipe,
    output: Path,
    *,
    resume: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
    cpu: bool = False,
) -> VisionRun:
    """Train a classifier into the folder `output`. Also runs under `torchrun`.

    Args:
        recipe: recipe of the run.
        output: folder of the run; the first process's value is used.
        resume: continue from the newest intact checkpoint in `output`.
        callbacks: additional Trainer callbacks.
        cpu: do not use an accelerator.

    Raises:
        ArgumentError: there are no images or no such mixer, sizes do not fit, the loss is not finite, or `output` has a
            finished run or one in progress.
    """
    process = process_state()
    output = Path(broadcast_object_list([str(output)])[0])
    with lock_folder(output) if process.is_main_process else nullcontext(), disk_errors(output):
        return _train(recipe, output, resume=resume, callbacks=callbacks, cpu=cpu)


def _train(
    recipe: VisionRecipe, output: Path, *, resume: bool, callbacks: Sequence[TrainerCallback], cpu: bool
) -> VisionRun:
    """Train into a folder that no other process uses."""
    checkpoints = output / "checkpoints"
    if (output / HISTORY).exists() or (list_checkpoints(checkpoints) and not resume):
        got = f"{str(output)!r}, which holds a run"
        hint = "Set `resume` to continue an unfinished run"
        raise ArgumentError("output", got=got, expected="a new folder", hint=hint)
    set_seed(recipe.seed)
    train_set, test_set = vision_data.load(recipe)
    model = build(recipe, len(train_set.classes), train_set.channels)
    trainer = _Trainer(
        recipe,
        len(train_set.classes),
        model=model,
        args=_arguments(recipe, output, cpu=cpu),
        train_dataset=train_set,
        eval_dataset=test_set,
        compute_metrics=lambda evaluation: {"accuracy": float((evaluation.predictions == evaluation.label_ids).mean())},
        preprocess_logits_for_metrics=lambda logits, _: logits.argmax(-1),
        callbacks=list(callbacks),
    )
    trainer.remove_callback(PrinterCallback)
    if trainer.is_world_process_zero():
        recipe.save(output)
    result = trainer.train_from(newest_checkpoint(checkpoints, processes=process_state().num_processes))
    history = trainer.state.log_history
    if trainer.is_world_process_zero():
        with replace_file(output / WEIGHTS) as partial:
            save_file(model.state_dict(), partial)
        write_text(output / HISTORY, json.dumps(history, indent=1) + "\n")
        shutil.rmtree(checkpoints, ignore_errors=True)
    accuracy = next(row["eval_accuracy"] for row in reversed(history) if "eval_accuracy" in row)
    return VisionRun(recipe, model, accuracy, result.metrics["train_runtime"], history)


def build(recipe: VisionRecipe, classes: int, channels: int) -> VisionModel:
    """Build the freshly initialized model of a recipe."""
    if recipe.mixer == "gated-kalmanet":
        mixer = gated_kalmanet
    else:
        mixer = None if recipe.mixer == "attention" else mixer_class(recipe.mixer, {})
    return VisionModel(
        mixer=mixer,
        width=recipe.width,
        stem_width=recipe.stem_width,
        depths=recipe.depths,
        heads=recipe.heads,
        windows=recipe.windows,
        drop_path_rate=recipe.drop_path,
        num_classes=classes,
        in_chans=channels,
    )


def load(folder: str | Path) -> VisionModel:
    """Load the trained model of the folder of a run, in evaluation mode.

    Raises:
        ArgumentError: a file is missing or damaged, or the weights do not fit the recipe.
    """
    folder = Path(folder)
    recipe = VisionRecipe.load(folder)
    try:
        headers = read_headers(folder)
        classes, channels = headers["head.bias"].shape[0], headers["stem.0.weight"].shape[1]
        model = build(recipe, classes, channels)
        check_weights(headers, model)
        model.load_state_dict(load_file(folder / WEIGHTS))
        check_finite(model)
    except (FileError, LookupError) as error:
        raise ArgumentError(
            "folder", got=f"{str(folder)!r}, which is damaged ({error})", expected="the folder of a finished run"
        ) from error
    return model.eval()


class _Trainer(SafeTrainer):
    """Trainer with kalmix's parameter groups, the recipe's schedule, and mixup and CutMix on the device."""

    def __init__(self, recipe: VisionRecipe, classes: int, **options: Any) -> None:
        self.recipe, self.classes, self.inputs = recipe, classes, {}
        super().__init__(**options)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            model = model or self.accelerator.unwrap_model(self.model)
            groups = optimizer_groups(
                model, learning_rate=self.recipe.learning_rate, weight_decay=self.recipe.weight_decay
            )
            self.optimizer = torch.optim.AdamW(groups, fused=True)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> torch.optim.lr_scheduler.LRScheduler:
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer,
                lambda step: self.recipe.learning_rate_factor(step / num_training_steps * self.recipe.total_epochs),
            )
        return self.lr_scheduler

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return a loader of all test images; in training, a short last batch is dropped."""
        self.args.dataloader_drop_last = False
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.args.dataloader_drop_last = True

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        images, labels = inputs["pixel_values"], inputs["labels"]
        if model.training:
            images, labels = vision_data.mix_images(images, labels, self.classes, self.recipe)
        logits = model(images.contiguous(memory_format=torch.channels_last))
        loss = F.cross_entropy(logits.float(), labels)
        return (loss, {"logits": logits}) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        if not math.isfinite(logs.get("loss", 0.0)):
            got = f"{self.recipe.learning_rate:g}, at which training diverged in step {self.state.global_step}"
            raise ArgumentError("learning_rate", got=got, expected="a lower one")
        super().log(logs, *args, **options)


def _arguments(recipe: VisionRecipe, output: Path, *, cpu: bool) -> TrainingArguments:
    """Return the `TrainingArguments` of a recipe."""
    cuda = torch.cuda.is_available() and not cpu
    return TrainingArguments(
        output_dir=str(output / "checkpoints"),
        per_device_train_batch_size=recipe.batch_size,
        per_device_eval_batch_size=recipe.batch_size,
        num_train_epochs=recipe.total_epochs,
        max_grad_norm=recipe.max_grad_norm,
        bf16=recipe.bf16,
        use_cpu=cpu or not torch.accelerator.is_available(),
        torch_compile=recipe.compile,
        seed=recipe.seed,
        label_names=["labels"],
        logging_strategy="epoch",
        logging_nan_inf_filter=False,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        ddp_find_unused_parameters=False,
        dataloader_drop_last=True,
        dataloader_num_workers=recipe.workers,
        dataloader_persistent_workers=recipe.workers > 0,
        dataloader_pin_memory=cuda,
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )
