"""Random weights for `load_format: dummy`: the model's shapes and bytes without a checkpoint."""

import hashlib
from collections.abc import Iterable

import torch

from tensorrt_llm._torch.modules.weight_spec import WeightSpec

# Near GLM-5.2's values and within half a bf16 step of 7: any rounding to bf16 makes them all equal.
ROUTER_BIAS = 7.0
ROUTER_BIAS_SPREAD = 0.02


def fill_dummy(specs: Iterable[WeightSpec], seed: int = 0) -> None:
    """Fill every target in place, on its own device, as its spec's `init` says.

    The values depend only on the seed, the tensor's name, the selected part and the device type.
    Matrices are scaled by the fan-in of the whole tensor, so a slice of a dummy model keeps
    activations as large as the whole model does.

    Raises:
        ValueError: an `init` that does not exist.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for spec in specs:
        device = spec.target.device
        generator = generators.setdefault(device, torch.Generator(device))
        generator.manual_seed(_tensor_seed(spec, seed))
        _fill(spec, generator)


def _tensor_seed(spec: WeightSpec, seed: int) -> int:
    text = f"{seed}:{spec.name}:{spec.rows}:{spec.cols}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


@torch.no_grad()
def _fill(spec: WeightSpec, generator: torch.Generator) -> None:
    match spec.init:
        case "matrix":
            spec.target.normal_(0.0, spec.shape[-1] ** -0.5, generator=generator)
        case "norm":
            spec.target.fill_(1.0)
        case "zero":
            spec.target.zero_()
        case "router_bias":
            spec.target.copy_(_router_bias(spec.target, generator))
        case _:
            raise ValueError(
                f"{spec.name}: init is {spec.init!r}; it must be matrix, norm, zero or router_bias"
            )


def _router_bias(target: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    count = target.numel()
    order = torch.randperm(count, generator=generator, device=target.device)
    offsets = (order.float() / max(1, count - 1) - 0.5) * ROUTER_BIAS_SPREAD
    return (ROUTER_BIAS + offsets).view(target.shape)
