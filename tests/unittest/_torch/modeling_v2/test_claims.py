"""Routing tables, target directories and class names say the same thing."""

import ast
from pathlib import Path
from types import ModuleType

import pytest

from tensorrt_llm._torch.modeling_v2 import _router_index
from tensorrt_llm._torch.modeling_v2._router_index import (
    MODELING_V2_ROUTERS,
    is_built,
    routing_module,
)

ROOT = Path(_router_index.__file__).parent
ROUTINGS = [routing_module(architecture) for architecture in MODELING_V2_ROUTERS]
TARGETS = [
    (routing, checkpoint, target)
    for routing in ROUTINGS
    if routing
    for checkpoint, target in routing._TARGETS.items()
]
DIRECTORIES = sorted(path for path in ROOT.glob("models/*/*__*") if path.is_dir())

each_target = pytest.mark.parametrize(
    ("routing", "checkpoint", "target"), TARGETS, ids=[t for _, _, t in TARGETS]
)


def directory(routing: ModuleType, target: str) -> str:
    return routing.TARGET_MODULES[target].split(".")[-2]


def test_every_routing_module_has_an_architecture() -> None:
    names = {name.replace(".", "/") + ".py" for name in MODELING_V2_ROUTERS.values()}
    assert {str(p.relative_to(ROOT)) for p in ROOT.glob("models/*/routing.py")} == names


@each_target
def test_a_targets_names_agree(routing: ModuleType, checkpoint: str, target: str) -> None:
    segments = directory(routing, target).split("__")
    assert len(segments) == 3 and segments[0] == checkpoint
    assert target == "ModelingV2" + "".join(
        part.capitalize() for segment in segments for part in segment.split("_")
    )
    claim = routing._CLAIMS[checkpoint]
    major_minor = "any" if claim.sm is None else "".join(map(str, claim.sm))
    assert segments[1] == f"sm_{major_minor}"
    assert segments[2] == ("tp_any" if claim.tp_size is None else f"tp{claim.tp_size}")


def test_each_claim_has_one_target_and_each_target_one_module() -> None:
    for routing in filter(None, ROUTINGS):
        assert routing._CLAIMS.keys() == routing._TARGETS.keys()
        assert set(routing._TARGETS.values()) == set(routing.TARGET_MODULES)
        assert len(set(routing.TARGET_MODULES.values())) == len(routing._TARGETS)
        assert set(routing._CHECKPOINTS.values()) <= set(routing._CLAIMS)
        assert len(set(routing._CHECKPOINTS.values())) == len(routing._CHECKPOINTS)


def test_every_target_directory_is_claimed_and_registers_its_class() -> None:
    """One without modeling.py is being built, and routing says so instead of naming it."""
    claimed = {
        directory(routing, target): (target, routing.TARGET_MODULES[target])
        for routing, _, target in TARGETS
    }
    for path in DIRECTORIES:
        assert path.name in claimed, f"{path.name} is claimed by no routing module"
        modeling, (target, module) = path / "modeling.py", claimed[path.name]
        assert is_built(module) is modeling.exists()
        if modeling.exists():
            assert f'@register_auto_model("{target}")' in modeling.read_text()


@pytest.mark.parametrize("file", sorted(ROOT.glob("models/*/routing.py")), ids=lambda p: p.parent)
def test_routing_does_not_read_what_nobody_sets(file: Path) -> None:
    read = {n.attr for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Attribute)}
    assert "is_disagg" not in read


@pytest.mark.parametrize("file", sorted(ROOT.glob("models/*/*/decode.py")), ids=lambda p: p.parent)
def test_a_decode_target_knows_its_phase(file: Path) -> None:
    read = {n.attr for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Attribute)}
    assert not read & {"num_contexts", "num_ctx_tokens"}
