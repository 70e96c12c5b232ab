"""Train GKAVision on handwritten digits with a CPU, or on a folder of images by the published recipe.

    python bench/examples/train_vision.py                                     # about a minute on two CPU cores
    python bench/examples/train_vision.py --mixer attention --seed 1          # attention in every block
    torchrun --nproc-per-node 8 bench/examples/train_vision.py --images imagenet --output run     # days on eight GPUs

The digits are scikit-learn's, of 8 x 8 pixels, enlarged to 64, for a small model of GKAVision's shape. A folder needs
`train` and `val`, each with one subfolder per class; its augmentation needs `kalmix[vision]`.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from transformers import TrainerCallback

from kalmix.layers import MIXERS
from kalmix_bench.experiments.vision.recipe import DIGITS, VisionRecipe
from kalmix_bench.experiments.vision.run import train


class EpochPrinter(TrainerCallback):
    """Callback that prints a line per epoch."""

    def on_evaluate(self, args, state, control, metrics, **_):
        if state.is_world_process_zero:
            loss = next(row["loss"] for row in reversed(state.log_history) if "loss" in row)
            accuracy = metrics["eval_accuracy"]
            print(f"epoch {state.epoch:5.0f}   loss {loss:.3f}   held-out accuracy {accuracy:7.2%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", help="folder of images; default: the digits")
    parser.add_argument("--mixer", default="gated-kalmanet", choices=[name for name in MIXERS if name != "design"])
    parser.add_argument("--epochs", type=int, help="epochs of the cosine schedule; default: the recipe's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="folder for weights and curves; default: a temporary one")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint of --output")
    given = parser.parse_args()
    recipe = DIGITS if given.images is None else VisionRecipe(images=given.images)
    recipe = replace(recipe, mixer=given.mixer, seed=given.seed, epochs=given.epochs or recipe.epochs)
    with tempfile.TemporaryDirectory() as nowhere:
        run = train(recipe, given.output or Path(nowhere) / "run", resume=given.resume, callbacks=[EpochPrinter()])
    weights = sum(weight.numel() for weight in run.model.parameters())
    print(f"{given.mixer}, seed {given.seed}: {weights:,} weights, {run.seconds:.0f} s, accuracy {run.accuracy:.2%}")


if __name__ == "__main__":
    main()
