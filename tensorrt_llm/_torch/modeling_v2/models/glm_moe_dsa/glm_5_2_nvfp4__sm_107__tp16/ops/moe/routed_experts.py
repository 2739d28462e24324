"""The routed experts of an MoE layer, up to their sum."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.custom_ops.fp4 import (
    NVFP4_GROUP,
    dequantize_nvfp4,
    quantize_nvfp4,
)
from tensorrt_llm._torch.modeling_v2.catalog._op import (
    Cell,
    OpWrapper,
    assert_bitwise,
    assert_within_ulp,
    define_op,
)

from .._cells import Draw, dtype_of, geometry_of
from .._checks import KERNEL_DTYPE, check_tensor, require
from .._numerics import (
    assert_rounded_once,
    assert_summed_in_fp32,
    noaux_tc,
    project,
    swiglu_rounded_once,
)
from ._operands import NVFP4_OPERANDS, nvfp4_operands, plain_operands

E4M3 = torch.float8_e4m3fn
SERVED_ROWS, SERVED_FUSED_ROWS = range(1, 33), range(1, 9)
SERVED_EXPERTS, SERVED_TOP_K, SERVED_HIDDEN, SERVED_SLICE = 256, 8, 6144, 128
ROUTER_WARPS = 4
IDLE_WORD = -(1 << 31)  # the bits of -0.0


def fused_router_workspace(device: torch.device, rows: int = 8, experts: int = 256) -> Tensor:
    """The exchange of the fused router in its state between launches: int32 [1 + 2 * rows * experts
    * 4], an epoch, then two buffers of idle words."""
    workspace = torch.full(
        (1 + 2 * rows * experts * ROUTER_WARPS,), IDLE_WORD, dtype=torch.int32, device=device
    )
    workspace[0] = 0
    return workspace


@define_op
class RoutedExperts(OpWrapper):
    """One MoE layer's routing and routed experts, each rank holding a slice of every expert,
    without the finalize step: the weighted sum over a token's experts, which the post-MoE hop forms
    (glm_mnnvl_moe_finalize_hop). It is TensorRT-LLM's fp4_block_scale_moe_runner with noaux_tc
    routing in one group over all experts, unfinalized.

    Routing, in one of two ways, with the same results to the bit:
    - from `routing_logits`, the result of glm_router_gemm;
    - fused: `router_hidden_states` and `router_weight` are given instead, and the routing kernel
      forms those logits itself, by glm_router_gemm's FMA chains and orders.
    Then noaux_tc as `_numerics.noaux_tc` states it: experts by falling score + bias, equal ones by
    rising id; weights in fp32, then rounded to `output_dtype`.

    Experts. Token t's k-th expert e has the row r = expanded_idx_to_permuted_idx[t, k];
    rows are sorted by expert, then by token. With I columns of an expert on this rank, sums fp32:

        NVFP4   u = (x . up_e) * output1_scale_scalar[e]
                g = (x . gate_e) * output1_scale_gate_scalar[e]
                h = quantize_nvfp4(silu(g) * u, 1)     groups of 16 along I, from fp32
                out[r] = round((h . down_e) * output2_scale_scalar[e])
        plain   u, g = round(x . up_e), round(x . gate_e)
                h = round(silu(g) * u); out[r] = round(h . down_e)

    In NVFP4 x, h, up, gate and down mean code * block scale; the global scales are in the three
    scalars. With s_x and s_h the checkpoint's input scales of FC1 and FC2 and w_gate, w_up, w_down
    its `weight_scale_2`: output1_scale_gate_scalar = s_x w_gate, output1_scale_scalar =
    s_x w_up / s_h (so u is in units of s_h, and h needs no other global scale),
    output2_scale_scalar = s_h w_down. One s_x for all experts and ranks. `round` is to
    `output_dtype` in NVFP4 and to the dtype of x in the plain form (none in fp32).

    The plain form, with unquantised weights and every scale None, is for models without NVFP4
    weights. It has no kernel and runs on the reference alone.

    Args:
        routing_logits: fp32 [rows, experts], or None.
        routing_bias: fp32 [experts], e_score_correction_bias.
        router_hidden_states: activation dtype [rows, hidden], the MoE input before quantisation.
        router_weight: its dtype [experts, hidden].
        router_workspace: int32, of `fused_router_workspace`. Launches that share one run in stream
            order. A launch exchanges sums through the buffer (epoch mod 2); by its end that buffer
            is idle again and the epoch is one higher. Each word is one warp's sum of one logit,
            [row][expert][warp]; a sum of -0.0 is sent as +0.0, since -0.0 means idle.
        hidden_states: uint8 [rows, hidden / 2], two e2m1 codes a byte, element 2j in the low
            nibble; plain: activation dtype [rows, hidden].
        hidden_states_scale: e4m3 [rows, hidden / 16], linear (fp4_quantize gives its bits).
        gemm1_weights: uint8 [experts, 2 * I, hidden / 2], of each expert its up rows, then its gate
            rows; plain: activation dtype [experts, 2 * I, hidden].
        gemm1_weights_scale: e4m3 [experts, 2 * I, hidden / 16], row-major.
        gemm2_weights: uint8 [experts, hidden, I / 2]; plain: activation dtype [experts, hidden, I].
        gemm2_weights_scale: e4m3 [experts, hidden, I / 16], row-major.
        output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar: fp32 [experts].
        top_k, routed_scaling_factor: of the routing.
        output_dtype: bf16; in the plain form the dtype of hidden_states.
        hidden_states_ready_event: a recorded cudaEvent_t (torch.cuda.Event.cuda_event) that says
            when hidden_states and hidden_states_scale are written on another stream. It is waited
            for right before FC1, so routing runs beside the quantisation. None: they are complete
            on this stream. The reference does not wait; it belongs to devices without streams.

    Returns:
        (out `output_dtype` [rows * top_k, hidden], without padding; the experts' weights in the
        order of routing, rounded once to `output_dtype` [rows, top_k];
        expanded_idx_to_permuted_idx int32 [rows, top_k], a permutation of the rows of out). They
        are the expert_rows, weights and places of glm_mnnvl_moe_finalize_hop.

    The kernels serve bf16, 256 experts, top 8, hidden 6144, I = 128 and up to 32 rows, 8 with the
    fused router, and refuse the rest; the reference serves every geometry, and fp32. Only chosen
    experts are read. All orders are fixed, so repeats are equal to the bit, and a row's results do
    not depend on the other rows, up to its place r.

    Three kernels under programmatic dependent launch:
    - Routing, fused: 128 CTAs form the logits of two experts each and publish the sums of their
      warps; one more polls them, adds them by rising warp and routes. Before its wait the kernel
      reads router_weight and routing_bias only. The routing CTA releases the dependents after all
      routing outputs are written, the others exit without.
    - FC1, SwiGLU and quantisation; releases its dependents after its own wait on routing.
    - FC2 at K = I = 128: one persistent CTA per SM over a contiguous run of units (a token tile of
      8 and 128 outputs); weights and block scales before the wait, FC1's output after it; per unit
      two MMAs of K = 64, their sum, the output scale in fp32, one rounding. It reads the routing
      outputs before its wait, which FC1's release allows, and releases its dependents right after
      the wait.

    Source: noaux_tc (arXiv 2412.19437, section 2.1.2); the NVFP4 format as ModelOpt exports it.
    """

    schema = (
        "glm_routed_experts(Tensor? routing_logits, Tensor routing_bias, "
        "Tensor? router_hidden_states, Tensor? router_weight, Tensor(a!)? router_workspace, "
        "Tensor hidden_states, Tensor? hidden_states_scale, Tensor gemm1_weights, "
        "Tensor? gemm1_weights_scale, Tensor gemm2_weights, Tensor? gemm2_weights_scale, "
        "Tensor? output1_scale_scalar, Tensor? output1_scale_gate_scalar, "
        "Tensor? output2_scale_scalar, int top_k, float routed_scaling_factor, "
        "ScalarType output_dtype, int? hidden_states_ready_event) -> (Tensor, Tensor, Tensor)"
    )
    CELLS = (
        Cell("verify step, K 7, fused router", {"rows": 8, "fused_router": True}),
        Cell("one row, fused router", {"rows": 1, "fused_router": True}),
        Cell("32 rows from the router GEMM's logits", {"rows": 32, "fused_router": False}),
    )

    @staticmethod
    def raw_call(
        routing_logits: Tensor | None,
        routing_bias: Tensor,
        router_hidden_states: Tensor | None,
        router_weight: Tensor | None,
        router_workspace: Tensor | None,
        hidden_states: Tensor,
        hidden_states_scale: Tensor | None,
        gemm1_weights: Tensor,
        gemm1_weights_scale: Tensor | None,
        gemm2_weights: Tensor,
        gemm2_weights_scale: Tensor | None,
        output1_scale_scalar: Tensor | None,
        output1_scale_gate_scalar: Tensor | None,
        output2_scale_scalar: Tensor | None,
        top_k: int,
        routed_scaling_factor: float,
        output_dtype: torch.dtype,
        hidden_states_ready_event: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.trtllm.glm_routed_experts(
            routing_logits,
            routing_bias,
            router_hidden_states,
            router_weight,
            router_workspace,
            hidden_states,
            hidden_states_scale,
            gemm1_weights,
            gemm1_weights_scale,
            gemm2_weights,
            gemm2_weights_scale,
            output1_scale_scalar,
            output1_scale_gate_scalar,
            output2_scale_scalar,
            top_k,
            routed_scaling_factor,
            output_dtype,
            hidden_states_ready_event,
        )

    @staticmethod
    def reference(
        routing_logits: Tensor | None,
        routing_bias: Tensor,
        router_hidden_states: Tensor | None,
        router_weight: Tensor | None,
        router_workspace: Tensor | None,
        hidden_states: Tensor,
        hidden_states_scale: Tensor | None,
        gemm1_weights: Tensor,
        gemm1_weights_scale: Tensor | None,
        gemm2_weights: Tensor,
        gemm2_weights_scale: Tensor | None,
        output1_scale_scalar: Tensor | None,
        output1_scale_gate_scalar: Tensor | None,
        output2_scale_scalar: Tensor | None,
        top_k: int,
        routed_scaling_factor: float,
        output_dtype: torch.dtype,
        hidden_states_ready_event: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if routing_logits is None:
            assert router_hidden_states is not None and router_weight is not None
            routing_logits = project(router_hidden_states, router_weight, torch.float32)
        if router_workspace is not None:
            router_workspace[0] += 1
        weights, ids = noaux_tc(routing_logits, routing_bias, top_k, routed_scaling_factor)
        order = ids.flatten().argsort(stable=True)  # [row of out] -> t * top_k + k

        out = hidden_states.new_empty(len(order), gemm2_weights.shape[1], dtype=output_dtype)
        for row in range(len(order)):  # by index tensors, so that a CUDA graph can capture it
            pair = order[row : row + 1]
            expert = ids.flatten().index_select(0, pair)
            x, fc1, fc2 = (
                _values(codes, scale, at)
                for codes, scale, at in (
                    (hidden_states, hidden_states_scale, pair // top_k),
                    (gemm1_weights, gemm1_weights_scale, expert),
                    (gemm2_weights, gemm2_weights_scale, expert),
                )
            )
            if output1_scale_scalar is None:
                up, gate = project(x, fc1[0]).chunk(2, dim=-1)
                out[row] = project(swiglu_rounded_once(gate, up), fc2[0])[0]
                continue
            assert output1_scale_gate_scalar is not None and output2_scale_scalar is not None
            up, gate = _exact_sums(x, fc1[0]).chunk(2, dim=-1)
            up, gate = up * output1_scale_scalar[expert], gate * output1_scale_gate_scalar[expert]
            one = torch.ones_like(output2_scale_scalar[:1])
            h = dequantize_nvfp4(*quantize_nvfp4(swiglu_rounded_once(gate, up), one), one)
            out[row] = (_exact_sums(h, fc2[0]) * output2_scale_scalar[expert]).to(output_dtype)[0]
        places = order.argsort().int().view(ids.shape)
        return out, weights.to(output_dtype), places

    @staticmethod
    def fake(
        routing_logits: Tensor | None,
        routing_bias: Tensor,
        router_hidden_states: Tensor | None,
        router_weight: Tensor | None,
        router_workspace: Tensor | None,
        hidden_states: Tensor,
        hidden_states_scale: Tensor | None,
        gemm1_weights: Tensor,
        gemm1_weights_scale: Tensor | None,
        gemm2_weights: Tensor,
        gemm2_weights_scale: Tensor | None,
        output1_scale_scalar: Tensor | None,
        output1_scale_gate_scalar: Tensor | None,
        output2_scale_scalar: Tensor | None,
        top_k: int,
        routed_scaling_factor: float,
        output_dtype: torch.dtype,
        hidden_states_ready_event: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, hidden, x = hidden_states.shape[0], gemm2_weights.shape[1], hidden_states
        return (
            x.new_empty(rows * top_k, hidden, dtype=output_dtype),
            x.new_empty(rows, top_k, dtype=output_dtype),
            x.new_empty(rows, top_k, dtype=torch.int32),
        )

    @staticmethod
    def is_valid(
        routing_logits: Tensor | None,
        routing_bias: Tensor,
        router_hidden_states: Tensor | None,
        router_weight: Tensor | None,
        router_workspace: Tensor | None,
        hidden_states: Tensor,
        hidden_states_scale: Tensor | None,
        gemm1_weights: Tensor,
        gemm1_weights_scale: Tensor | None,
        gemm2_weights: Tensor,
        gemm2_weights_scale: Tensor | None,
        output1_scale_scalar: Tensor | None,
        output1_scale_gate_scalar: Tensor | None,
        output2_scale_scalar: Tensor | None,
        top_k: int,
        routed_scaling_factor: float,
        output_dtype: torch.dtype,
        hidden_states_ready_event: int | None,
    ) -> None:
        scales = (
            hidden_states_scale,
            gemm1_weights_scale,
            gemm2_weights_scale,
            output1_scale_scalar,
            output1_scale_gate_scalar,
            output2_scale_scalar,
        )
        check_tensor("gemm2_weights", gemm2_weights, (None, None, None))
        experts, hidden, inner = gemm2_weights.shape
        nvfp4 = hidden_states.dtype == torch.uint8
        part = 2 * inner if nvfp4 else inner
        require(0 < top_k <= experts, f"top_k is {top_k}; it must be in [1, {experts}]")
        _check_operands(hidden_states, gemm1_weights, gemm2_weights, hidden, part, nvfp4)
        rows = hidden_states.shape[0]
        if nvfp4:
            _check_scales(scales, rows, experts, hidden, part)
        else:
            for name, scale in zip(NVFP4_OPERANDS, scales, strict=True):
                require(scale is None, f"{name} is given, but hidden_states is not NVFP4 (uint8)")
            require(
                output_dtype == hidden_states.dtype,
                f"output_dtype is {output_dtype}; it must be {hidden_states.dtype}, hidden_states'",
            )
        check_tensor("routing_bias", routing_bias, (experts,), torch.float32)
        _check_routing(
            routing_logits,
            (router_hidden_states, router_weight, router_workspace),
            (rows, experts, hidden),
        )
        require(
            hidden_states_ready_event != 0,
            "hidden_states_ready_event is 0, an event that was never recorded; record it on the "
            "stream that writes hidden_states first",
        )
        if output_dtype == KERNEL_DTYPE:
            _check_served(nvfp4, rows, routing_logits is None, experts, top_k, hidden, part)

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        draw, geometry, dtype = Draw(device, generator), geometry_of(cell), dtype_of(cell)
        rows, hidden = cell.spec["rows"], geometry.hidden_size
        experts = geometry.n_routed_experts
        x = draw.normal(rows, hidden, dtype=dtype)
        router_weight = draw.weight(experts, hidden, dtype=dtype)
        fused = cell.spec["fused_router"]
        operands = (nvfp4_operands if cell.spec.get("nvfp4", True) else plain_operands)(
            draw, geometry, x
        )
        return {
            "routing_logits": None if fused else project(x, router_weight, torch.float32),
            # Where the checkpoint's bias lies: near 7 with differences that bf16 would erase.
            "routing_bias": draw.normal(experts, mean=6.94, std=0.06),
            "router_hidden_states": x if fused else None,
            "router_weight": router_weight if fused else None,
            "router_workspace": (
                fused_router_workspace(device, max(rows, 8), experts) if fused else None
            ),
            **operands,
            "top_k": geometry.num_experts_per_tok,
            "routed_scaling_factor": geometry.routed_scaling_factor,
            "output_dtype": dtype,
            "hidden_states_ready_event": None,
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        """As if the tokens chose different experts, as far as there are."""
        experts, hidden, _ = inputs["gemm2_weights"].shape
        rows, top_k = inputs["hidden_states"].shape[0], inputs["top_k"]

        def nbytes(*names: str) -> int:
            return sum(inputs[name].nbytes for name in names if inputs[name] is not None)

        stored = nbytes(
            "gemm1_weights", "gemm1_weights_scale", "gemm2_weights", "gemm2_weights_scale"
        )
        weights = stored * min(experts, rows * top_k) // experts
        read = nbytes(
            "routing_logits",
            "routing_bias",
            "router_hidden_states",
            "router_weight",
            "hidden_states",
            "hidden_states_scale",
        )
        written = rows * top_k * (hidden * inputs["output_dtype"].itemsize + 8)
        return weights + read + written

    @staticmethod
    def compare(out: Sequence[Tensor], ref: Sequence[Tensor]) -> None:
        """Places and workspace to the bit. Weights: a weight's relative change is at most that of
        its logit (a sum of 6144 products of about 1), the band of such sums, then one rounding.

        Rows: before h is quantised again the two are within 2^-18 of each other (fp32 sums of 6144
        terms and the exponential). One of its 128 values crosses a border between two codes with a
        probability of 2^-10, and then moves the outputs of its row by up to 2 / (3 sqrt(128)) of
        their rms, which is 15 bf16 ulp; so 16 for single elements, and an rms of 2, which one row
        of 56 with such a value reaches."""
        assert_within_ulp(out[0], ref[0], element_ulp=16, rms_ulp=2)
        if out[1].dtype == torch.float32:
            assert_summed_in_fp32(out[1], ref[1], terms=SERVED_HIDDEN)
        else:
            assert_rounded_once(out[1], ref[1])
        assert_bitwise(out[2:], ref[2:])


def _values(codes: Tensor, scale: Tensor | None, at: Tensor) -> Tensor:
    """codes[at] as they are, or code * scale in fp32, exactly."""
    chosen = codes.index_select(0, at)
    if scale is None:
        return chosen
    # No index_select for e4m3 on every device; its bits serve.
    bits = scale.view(torch.uint8).index_select(0, at)
    return dequantize_nvfp4(chosen, bits.view(E4M3), torch.ones((), device=codes.device))


def _exact_sums(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T of NVFP4 values, rounded once to fp32: in fp64 such sums are exact below 2^33,
    their products being multiples of 2^-20."""
    return (x.double() @ weight.double().T).float()


def _check_operands(
    x: Tensor, gemm1: Tensor, gemm2: Tensor, hidden: int, part: int, nvfp4: bool
) -> None:
    packed = 2 if nvfp4 else 1
    check_tensor("hidden_states", x, (None, hidden // packed))
    experts = gemm2.shape[0]
    check_tensor("gemm1_weights", gemm1, (experts, 2 * part, hidden // packed), x.dtype)
    check_tensor("gemm2_weights", gemm2, (experts, hidden, part // packed), x.dtype)
    if nvfp4:
        for what, size in (("hidden size", hidden), ("expert slice", part)):
            require(size % NVFP4_GROUP == 0, f"the {what} is {size}; it must be a multiple of 16")


def _check_scales(
    scales: tuple[Tensor | None, ...], rows: int, experts: int, hidden: int, part: int
) -> None:
    shapes: tuple[tuple[int, ...], ...] = (
        (rows, hidden // NVFP4_GROUP),
        (experts, 2 * part, hidden // NVFP4_GROUP),
        (experts, hidden, part // NVFP4_GROUP),
        (experts,),
        (experts,),
        (experts,),
    )
    for name, scale, shape in zip(NVFP4_OPERANDS, scales, shapes, strict=True):
        require(scale is not None, f"{name} is None; NVFP4 hidden_states (uint8) need it")
        assert scale is not None
        check_tensor(name, scale, shape, E4M3 if len(shape) > 1 else torch.float32)


def _check_routing(
    logits: Tensor | None,
    router: tuple[Tensor | None, Tensor | None, Tensor | None],
    sizes: tuple[int, int, int],
) -> None:
    rows, experts, hidden = sizes
    x, weight, workspace = router
    given = sum(t is not None for t in router)
    require(
        given == (3 if logits is None else 0),
        "give either routing_logits, or router_hidden_states, router_weight and router_workspace",
    )
    if logits is not None:
        check_tensor("routing_logits", logits, (rows, experts), torch.float32)
        return
    assert x is not None and weight is not None and workspace is not None
    check_tensor("router_hidden_states", x, (rows, hidden))
    check_tensor("router_weight", weight, (experts, hidden), x.dtype)
    words = 2 * rows * experts * ROUTER_WARPS
    check_tensor("router_workspace", workspace, (None,), torch.int32)
    require(
        len(workspace) > words,
        f"router_workspace has {len(workspace)} words; {rows} rows need at least {1 + words}",
    )
    busy = int((workspace[1:] != IDLE_WORD).sum())
    require(
        not busy,
        f"router_workspace has {busy} words that are not idle; between launches all are, as "
        "fused_router_workspace makes them",
    )


def _check_served(
    nvfp4: bool, rows: int, fused: bool, experts: int, top_k: int, hidden: int, part: int
) -> None:
    require(nvfp4, "hidden_states is bf16; the kernels serve NVFP4 operands")
    served = SERVED_FUSED_ROWS if fused else SERVED_ROWS
    require(rows in served, f"the number of rows is {rows}; the kernels serve {served}")
    for what, size, wanted in (
        ("the number of experts", experts, SERVED_EXPERTS),
        ("top_k", top_k, SERVED_TOP_K),
        ("the hidden size", hidden, SERVED_HIDDEN),
        ("the expert slice", part, SERVED_SLICE),
    ):
        require(size == wanted, f"{what} is {size}; the kernels serve {wanted}")


routed_experts = RoutedExperts()
