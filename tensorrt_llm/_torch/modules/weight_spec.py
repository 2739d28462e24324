"""One line of the loading plan: which part of which checkpoint tensor fills which part of which
parameter."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class WeightSpec:
    """A model lists one spec for every tensor that it needs from the checkpoint.

    Args:
        name: hub name of the tensor, for example `model.layers.3.mlp.experts.7.up_proj.weight`.
        shape: its full logical shape in the checkpoint, before packing, (out, in) for a matrix.
        target: the parameter or a view into it that receives the values, shaped as the selected
            part.
        rows, cols: the part of the first and second dimension that this rank needs, as (start,
            stop); None is all.
        quantizable: the checkpoint may store it as FP8 128x128 blocks or NVFP4 groups; else only
            plain floats.
        exact_fp32: the checkpoint has to store it as F32 (e_score_correction_bias).
        init: how `load_format: dummy` fills it: "matrix" (normal, std = fan_in ** -0.5), "norm"
            (ones), "zero" or "router_bias" (values near 7, distinct in fp32 only).
    """

    name: str
    shape: tuple[int, ...]
    target: torch.Tensor
    rows: tuple[int, int] | None = None
    cols: tuple[int, int] | None = None
    quantizable: bool = False
    exact_fp32: bool = False
    init: str = "matrix"
