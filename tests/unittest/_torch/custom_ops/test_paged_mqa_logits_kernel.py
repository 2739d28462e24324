"""The kernel of `paged_mqa_logits` without a GPU: interpreted by Triton, and compiled by it.

Run as a program with an architecture (90, 100, 107) this file compiles the kernel for that one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tensorrt_llm._torch.custom_ops import paged_mqa_logits as module

TRITON_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
}


def run_python(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Another interpreter with the same import path: what is compiled or interpreted is decided
    when Triton is imported, and a compiler that gives up takes its process with it."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.skipif(
    module.triton is None or torch.cuda.is_available(),
    reason="needs Triton, and where there is a GPU the kernel itself is tested",
)
def test_the_kernel_interpreted() -> None:
    """All tests of the scores that need no GPU, with the kernel in place of plain torch."""
    tests = str(Path(__file__).with_name("test_paged_mqa_logits.py"))
    done = run_python("-m", "pytest", "-q", "-x", "-m", "not gpu", tests, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(module.triton is None, reason="needs Triton's compiler")
@pytest.mark.parametrize("arch", [90, 100, 107])
def test_compiles_for(arch, tmp_path) -> None:
    done = run_python(__file__, str(arch), TRITON_CACHE_DIR=str(tmp_path))
    if "is not a recognized processor" in done.stderr:
        pytest.skip(f"this Triton does not know sm_{arch}")
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.rglob("*.cubin"))) == 2 * len(TRITON_NAMES)


def compile_for(arch: int) -> None:
    """The kernel for each cached dtype: full tiles of the target, and one row of the tiny model."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for key_dtype, name in TRITON_NAMES.items():
        operand = module.OPERAND_BYTES[key_dtype]
        types = {"q": f"*{name}", "keys": f"*{name}", "w": "*fp32", "scales": "*fp32"}
        types |= {"out": "*fp32", "positions": "*i64"}
        types |= dict.fromkeys(("table", "schedule", "row_order"), "*i32")
        no_scales = {} if key_dtype == torch.float8_e4m3fn else {"scales": None}
        full = {"HEADS": 32, "DIM": 128, "TOKENS_PER_BLOCK": 32}
        full["ROWS"] = module.COLUMNS[operand] // full["HEADS"]
        # Triton makes constants of numbers that are 1.
        tiny = {"HEADS": 16, "DIM": 32, "TOKENS_PER_BLOCK": 4, "ROWS": 1, "rows": 1, "requests": 1}
        for shape in (full, tiny):
            constants = {**shape, **no_scales, "KEYS": module.CHUNK, "STAGES": module.STAGES}
            signature = {
                argument: "constexpr" if argument in constants else types.get(argument, "i32")
                for argument in module._score_kernel.arg_names
            }
            # Addresses and strides are multiples of 16, as the target's are.
            aligned = [n for n in types if signature[n] != "constexpr"]
            aligned += ["keys_stride", "scales_stride", "out_stride"]
            at = module._score_kernel.arg_names.index
            attributes = {(at(n),): [["tt.divisibility", 16]] for n in aligned}
            compile(
                ASTSource(module._score_kernel, signature, constants, attributes),
                target=GPUTarget("cuda", arch, 32),
                options={"num_warps": module.WARPS[operand]},
            )


if __name__ == "__main__":
    compile_for(int(sys.argv[1]))
