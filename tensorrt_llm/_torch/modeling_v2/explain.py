"""Why a deployment gets a target or not, and what the target's ops are certified for.

    python -m tensorrt_llm._torch.modeling_v2.explain --model DIR --tp 16 --sm 10.7 \\
        --spec mtp_eagle:7

needs no GPU and only DIR/config.json. Exit code 0: there is a target, 1: there is none.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tensorrt_llm._torch.modeling_v2._router_index import (
    ModelingV2Context,
    NoTarget,
    Trace,
    find_target,
    routing_module,
)
from tensorrt_llm._torch.modeling_v2.catalog._op import Arch, Cell, OpWrapper, all_ops
from tensorrt_llm._torch.modeling_v2.receipts import verify
from tensorrt_llm._torch.models.model_config import PretrainedConfig, QuantConfig
from tensorrt_llm._torch.speculative.interface import SpecConfig, SpeculativeDecodingMode
from tensorrt_llm.mapping import Mapping

SPEC_MODES = {
    "mtp_eagle": SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL,
    "mtp": SpeculativeDecodingMode.MTP,
    "ngram": SpeculativeDecodingMode.NGRAM,
}


@dataclass(frozen=True)
class OpLine:
    """One op of the decode step: the cell it runs in, the bytes it moves at least, and its
    certification by architecture."""

    op: str
    cell: str
    bytes: int
    certification: dict[str, str]


def parse_sm(text: str) -> tuple[int, int]:
    """`10.7` -> (10, 7)."""
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no compute capability; write 10.7")
    return int(major), int(minor)


def parse_spec(text: str) -> SpecConfig | None:
    """`mtp_eagle:7` -> that mode with 7 drafts, `none` -> None."""
    if text == "none":
        return None
    mode, _, drafts = text.partition(":")
    if mode not in SPEC_MODES or not drafts.isdecimal() or int(drafts) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of {', '.join(SPEC_MODES)} with a number of drafts (mtp_eagle:7), "
            "nor none"
        )
    return SpecConfig(SPEC_MODES[mode], int(drafts))


def context_of(options: argparse.Namespace) -> ModelingV2Context:
    """The deployment that the flags describe.

    Raises:
        ValueError: a checkpoint or sizes that no deployment can have.
    """
    return ModelingV2Context(
        pretrained_config=PretrainedConfig.from_directory(options.model),
        mapping=Mapping(
            world_size=options.tp,
            tp_size=options.tp,
            moe_ep_size=options.ep,
            enable_attention_dp=options.attention_dp,
        ),
        sm=options.sm,
        quant_config=QuantConfig.from_directory(options.model),
        spec_config=options.spec,
    )


def op_lines(module: str, rows: int) -> list[OpLine]:
    """The ops of a target's family and of the shared catalog, each in its cell for a decode step
    of `rows` token rows."""
    family = module.rsplit(".", 2)[0]
    return [
        OpLine(
            op=name,
            cell=(cell := _step_cell(record, rows)).why,
            bytes=record.bytes_moved(_inputs(record, cell)),
            certification={arch.value: verify(record, arch).value for arch in Arch},
        )
        for name, record in all_ops().items()
        if f".{family}." in record.__module__ or ".catalog." in record.__module__
    ]


def _step_cell(record: type[OpWrapper], rows: int) -> Cell:
    fitting = (cell for cell in record.CELLS if cell.spec.get("rows") == rows)
    return next(fitting, record.CELLS[0])


def _inputs(record: type[OpWrapper], cell: Cell) -> dict[str, Any]:
    return record.make_inputs(cell, torch.device("cpu"), torch.Generator().manual_seed(0))


def explain(options: argparse.Namespace) -> dict[str, Any]:
    """The decision and its criteria, and a target's directory and ops."""
    context, trace = context_of(options), Trace()
    target = find_target(context, None, trace)
    report: dict[str, Any] = {"criteria": [asdict(step) for step in trace.steps]}
    if isinstance(target, NoTarget):
        return {**report, "target": None, "reason": target.reason}
    router = routing_module(context.pretrained_config.architectures[0])
    assert router is not None
    module: str = router.TARGET_MODULES[target]
    rows = 1 + (context.spec_config.max_draft_len if context.spec_config else 0)
    directory = module.removesuffix(".modeling").replace(".", "/")
    ops = [asdict(line) for line in op_lines(module, rows)]
    return {**report, "target": target, "directory": directory, "ops": ops}


def as_text(report: dict[str, Any]) -> str:
    lines = [
        f"{step['label']:<20} {step['value']!r:<28} {step['outcome'] or 'NO MATCH'}"
        for step in report["criteria"]
    ]
    if report["target"] is None:
        return "\n".join([*lines, "", f"no target: {report['reason']}"])
    lines += ["", f"target {report['target']} in {report['directory']}"]
    for op in report["ops"]:
        earned = [arch for arch, state in op["certification"].items() if state == "certified"]
        told = ", ".join(earned) or "no architecture"
        lines.append(f"{op['op']:<32} {op['bytes']:>12} B  {told:<24} {op['cell']}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--ep", type=int, default=1, help="expert-parallel ranks of these")
    parser.add_argument("--attention-dp", action="store_true", help="attention data parallelism")
    parser.add_argument("--sm", type=parse_sm, help="compute capability, 10.7; none: the CPU")
    parser.add_argument("--spec", type=parse_spec, default="none", help="mtp_eagle:7, ..., none")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    options = parser.parse_args(arguments)
    try:
        report = explain(options)
    except ValueError as error:
        parser.error(str(error))
    print(json.dumps(report, indent=2) if options.json else as_text(report))
    return 0 if report["target"] else 1


if __name__ == "__main__":
    sys.exit(main())
