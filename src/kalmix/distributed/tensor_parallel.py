"""Tensor parallelism: each rank runs the recurrences of its heads, with its share of the projections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from kalmix.errors import ArgumentError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Split(NamedTuple):
    """Division of a parameter among ranks.

    Attributes:
        dim: dimension along which the parameter holds several parts, one after the other.
        parts: widths of the parts. Each rank takes the r-th of R pieces of each part.
        shared: number of columns or rows before the parts that every rank uses.
    """

    dim: int
    parts: tuple[int, ...]
    shared: int = 0

    def take(self, x: Tensor, rank: int, ranks: int) -> Tensor:
        """Return what a rank uses of a whole parameter."""
        first, *parts = x.split([self.shared, *self.parts], self.dim)
        return torch.cat([first, *(part.chunk(ranks, self.dim)[rank] for part in parts)], self.dim)

    def join(self, pieces: list[Tensor]) -> Tensor:
        """Return the whole parameter from what each rank uses. No rows are shared."""
        widths = [part // len(pieces) for part in self.parts]
        parts = zip(*(piece.split(widths, self.dim) for piece in pieces), strict=True)
        return torch.cat([x for part in parts for x in part], self.dim)


SHARED = "shared"  # every rank uses all of it, for its heads
ADDED = "added"  # a bias of the sum over ranks
WHOLE = "whole"  # every rank computes the same with it
Plan = dict[str, "Split | str"]


class HeadSharding(nn.Module):
    """Module whose heads `shard_heads` can divide among ranks.

    Attributes:
        tensor_parallel: group of the ranks that divide the heads; `None` if one process has all.
    """

    tensor_parallel: Any = None

    def head_plan(self, ranks: int) -> Plan:
        """Return how the ranks divide each parameter.

        Raises:
            ArgumentError: the layer cannot be divided among so many ranks.
        """
        problem = "cannot take part in tensor parallelism, since its heads are combined before the output projection"
        raise ArgumentError(type(self).__name__, problem=problem, expected="a layer whose heads are independent")

    def keep_heads(self, ranks: int, rank: int) -> None:
        """Change sizes to those of the heads of one rank."""
        self.sizes: Any = self.sizes.share(ranks)


class _SumGradients(torch.autograd.Function):
    """Identity whose gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad = grad.contiguous().clone()
        distributed.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    """Sum over ranks, of which each rank has the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.contiguous().clone()
        distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None


class _Gather(torch.autograd.Function):
    """Concatenation over ranks along the last axis; the gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        pieces = [torch.empty_like(x) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(pieces, x.contiguous(), group=group)
        return torch.cat(pieces, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad = grad.contiguous().clone()
        distributed.all_reduce(grad, group=ctx.group)
        rank, ranks = distributed.get_rank(ctx.group), distributed.get_world_size(ctx.group)
        return grad.chunk(ranks, -1)[rank].contiguous(), None


def gather_channels(x: Tensor, group: Any) -> Tensor:
    """Return the channels of all ranks `[..., C]`, from those of this rank; `group=None` returns `x`."""
    return x if group is None else _Gather.apply(x, group)  # pyright: ignore[reportReturnType]


def draw_noise(like: Tensor, group: Any) -> Tensor:
    """Draw standard Gaussian noise with PyTorch's global generator, in the shape of `like` `[..., C]`.

    Each rank draws the noise for the channels of all ranks, and returns that for its own. So ranks with equal
    generators have independent noise in their channels, the same as one process.

    Args:
        like: tensor with the channels of this rank.
        group: ranks that divide the channels; `None` if one process has all.
    """
    if group is None:
        return torch.randn_like(like)
    rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
    return torch.randn_like(like.repeat_interleave(ranks, -1)).chunk(ranks, -1)[rank]


def shard_heads(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the heads of all layers of a model, and the columns of its MLPs, among the ranks of a mesh, in place.

    Each rank keeps its share of projections, convolutions and dynamics, runs the recurrences of its heads, and adds up
    the outputs of all ranks after the output projection. Every rank calls the model with the same tokens and gets the
    same outputs. The result equals that of one process. Each part of a packed projection is divided at head boundaries.

    Parameters become DTensors, so that optimizers and `clip_grad_norm_` work. Embedding, head and norms stay whole on
    each rank. Load the weights before; `gather_heads` returns a state dict with whole weights.

    Args:
        model: a layer, a block, or a model of layers of kalmix, with the same weights on every rank.
        mesh: device mesh of one dimension, such as `mesh["tp"]`.

    Raises:
        ArgumentError: the number of ranks does not divide the key heads of a layer, the channels of a `KLA`, or the
            width of an MLP; a layer combines its heads; or `mesh` has several dimensions. The model is then unchanged.

    Example:
        >>> from torch import distributed
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from kalmix.distributed import shard_heads
        >>> from kalmix.layers import GatedDeltaNet
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> layer, x = GatedDeltaNet(16, heads=2), torch.randn(1, 8, 16)
        >>> expected, _ = layer(x)
        >>> shard_heads(layer, init_device_mesh("cpu", (1,)))
        >>> torch.allclose(layer(x)[0], expected, atol=1e-6)
        True
        >>> distributed.destroy_process_group()
    """
    if not hasattr(mesh, "get_group") or mesh.ndim != 1:
        got = f"{mesh.ndim} dimensions" if hasattr(mesh, "ndim") else f"a {type(mesh).__name__}"
        raise ArgumentError("mesh", got=got, expected="a DeviceMesh of one dimension", hint='Try mesh["tp"]')
    units: dict[str, Any] = {name: module for name, module in model.named_modules() if hasattr(module, "head_plan")}
    plans: dict[str, Plan] = {name: unit.head_plan(mesh.size()) for name, unit in units.items()}
    placed: Plan = {f"{name}.{key}".lstrip("."): split for name, plan in plans.items() for key, split in plan.items()}
    _distribute(model, placed, mesh)
    for unit in units.values():
        unit.keep_heads(mesh.size(), mesh.get_local_rank())
        _exchange(unit, mesh.get_group())
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{unit}." if unit else "") and name != unit for unit in units)
        if name in units or (not inside and next(module.parameters(recurse=False), None) is not None):
            for method in ("forward", "filter", "try_read", "project_out", "project_out_variance"):
                if hasattr(module, method):
                    setattr(module, method, _with_local_parameters(module, getattr(module, method), mesh))


def gather_heads(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model with whole weights, after `shard_heads`; call it on every rank.

    Example:
        >>> from kalmix.distributed import gather_heads
        >>> from kalmix.layers import KLA
        >>> gather_heads(KLA(16))["skip"].shape  # a layer that is not divided
        torch.Size([16])
    """
    whole: dict[str, Tensor] = {}
    for name, x in model.state_dict(keep_vars=True).items():
        split, mesh = getattr(x, "_kalmix_split", None), getattr(x, "device_mesh", None)
        local = (x.to_local() if mesh is not None else x).detach()  # pyright: ignore[reportCallIssue]
        if isinstance(split, Split) and not split.shared and mesh is not None:
            pieces = [torch.empty_like(local) for _ in range(mesh.size())]
            distributed.all_gather(pieces, local.contiguous(), group=mesh.get_group())
            local = split.join(pieces)
        whole[name] = local
    return whole


def check_divides(layer: nn.Module, parts: str, count: int, ranks: int) -> None:
    """Check that the ranks can divide `count` parts of a layer, such as its heads, among them.

    Raises:
        ArgumentError: they cannot.
    """
    if count % ranks:
        problem = f"cannot take part in tensor parallelism over {ranks} ranks, since it has {count} {parts}"
        raise ArgumentError(type(layer).__name__, problem=problem, expected=f"a multiple of {ranks} {parts}")


def _distribute(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Replace the parameters by DTensors."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    made: dict[int, nn.Parameter] = {}  # parameters may be tied
    for name, module in model.named_modules():
        for key, x in list(module.named_parameters(recurse=False)):
            if id(x) not in made:
                split, placement, local = plan.get(f"{name}.{key}".lstrip("."), WHOLE), Replicate(), x.detach()
                if isinstance(split, Split) and not split.shared:
                    placement = Shard(split.dim)
                    local = split.take(local, mesh.get_local_rank(), mesh.size()).contiguous()
                sharded = DTensor.from_local(local, mesh, [placement], run_check=False)
                made[id(x)] = nn.Parameter(sharded, requires_grad=x.requires_grad)
                made[id(x)]._kalmix_split = split  # pyright: ignore[reportAttributeAccessIssue]
            setattr(module, key, made[id(x)])


def _exchange(unit: Any, group: Any) -> None:
    """Sum the gradients of a layer's input and the outputs of its heads over ranks."""
    unit.tensor_parallel = group
    entry = "read" if hasattr(unit, "read") else "forward"
    call: Callable[..., Any] = getattr(unit, entry)

    @wraps(call)
    def enter(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return call(_SumGradients.apply(x, group), *args, **kwargs)

    setattr(unit, entry, enter)
    unit.out_proj.register_forward_hook(lambda module, args, output: _Sum.apply(output, group))
    if getattr(unit, "has_posterior", False):
        variance: Callable[..., Tensor] = unit.project_out_variance
        unit.project_out_variance = lambda *args: _Sum.apply(variance(*args), group)


def _with_local_parameters(module: nn.Module, call: Callable[..., Any], mesh: DeviceMesh) -> Callable[..., Any]:
    @wraps(call)
    def with_local_parameters(*args: Any, **kwargs: Any) -> Any:
        with _local_parameters(module, mesh):
            return call(*args, **kwargs)

    return with_local_parameters


@contextmanager
def _local_parameters(module: nn.Module, mesh: DeviceMesh) -> Iterator[None]:
    """Let a module and those inside it see the tensors that this rank uses in place of DTensors."""
    replaced: list[tuple[nn.Module, str, Tensor]] = []
    for owner in module.modules():
        for key, x in owner._parameters.items():
            if x is not None and hasattr(x, "_kalmix_split"):  # not inside another call
                replaced.append((owner, key, x))
    try:
        for owner, key, x in replaced:
            owner._parameters[key] = _local(x, mesh)  # pyright: ignore[reportArgumentType]
        yield
    finally:
        for owner, key, x in replaced:
            owner._parameters[key] = x  # pyright: ignore[reportArgumentType]


def _local(x: Any, mesh: DeviceMesh) -> Tensor:
    """Return what this rank uses of a parameter, with the right gradient."""
    split, local = x._kalmix_split, x.to_local()
    if split == WHOLE or (isinstance(split, Split) and not split.shared):
        return local
    local = _SumGradients.apply(local, mesh.get_group())
    if isinstance(split, Split):
        return split.take(local, mesh.get_local_rank(), mesh.size())
    return local / mesh.size() if split == ADDED else local
