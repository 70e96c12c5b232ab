"""Remove noise from handwritten digits with `FilterConv2d` in the place of a convolution.

    python examples/denoise_digits.py                     # a minute or two on two CPU cores
    python examples/denoise_digits.py --noise 0.1 --seed 1

Small models learn to remove Gaussian noise from scikit-learn's digits (8 x 8 pixels between 0 and 1), with new noise at
every step. 360 digits are held out. A model is one layer, or two with an activation between them; models with a filter
have fewer parameters.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from kalmix.layers import FilterConv2d

HELD_OUT, BATCH = 360, 64


def models() -> dict[str, tuple[nn.Module, float]]:
    """Return each model with its learning rate, the best on held-out digits from 0.01 to 0.1 (filters: 0.05 or 0.1)."""

    def conv(inputs: int, outputs: int, size: int) -> nn.Conv2d:
        return nn.Conv2d(inputs, outputs, size, padding=size // 2)

    return {
        "a convolution, 13 x 13": (conv(1, 1, 13), 0.03),
        "a filter, 3 x 3": (FilterConv2d(1, 1, 3, heads=4, head_dim=2), 0.05),
        "two convolutions, 3 x 3": (nn.Sequential(conv(1, 7, 3), nn.GELU(), conv(7, 1, 3)), 0.1),
        "a filter, a convolution": (
            nn.Sequential(FilterConv2d(1, 3, 3, heads=3, head_dim=1), nn.GELU(), conv(3, 1, 3)),
            0.05,
        ),
    }


def train(model: nn.Module, digits: Tensor, noise: float, rate: float, epochs: int) -> None:
    """Train on the squared error with Adam and a cosine schedule."""
    optimizer, steps = torch.optim.Adam(model.parameters(), rate), epochs * (len(digits) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        clean = digits[torch.randint(len(digits), (BATCH,))]
        loss = F.mse_loss(model(clean + noise * torch.randn_like(clean)), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", type=float, default=0.25, help="standard deviation of the noise")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw = torch.Generator().manual_seed(0)
    digits = torch.from_numpy(load_digits().images).float()[:, None] / 16
    held_out, rest = digits[torch.randperm(len(digits), generator=draw)].tensor_split([HELD_OUT])
    noisy = held_out + given.noise * torch.randn(held_out.shape, generator=draw)
    print(f"squared error, held out: {F.mse_loss(noisy, held_out):.5f} of the noise, noise {given.noise:g}", flush=True)
    torch.manual_seed(given.seed)
    for name, (model, rate) in models().items():
        began = time.perf_counter()
        train(model, rest, given.noise, rate, given.epochs)
        seconds = time.perf_counter() - began
        with torch.no_grad():
            error = F.mse_loss(model(noisy), held_out)
        weights = sum(weight.numel() for weight in model.parameters())
        print(f"{name:>24}: {error:.5f}   {weights} weights, {seconds:.1f} s to train, seed {given.seed}", flush=True)


if __name__ == "__main__":
    main()
