import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tensorrt_llm._torch.models.checkpoints import CheckpointError, CheckpointReader
from tensorrt_llm._torch.models.checkpoints import reader as reader_module

MATRIX = torch.arange(42, dtype=torch.float32).view(6, 7)
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def test_headers_name_shape_dtype_and_shard(write_checkpoint):
    path = write_checkpoint({"a": MATRIX, "b": torch.tensor(3.0, dtype=torch.bfloat16)})
    reader = CheckpointReader(path)
    assert reader.tensors["a"].shape == (6, 7)
    assert (reader.tensors["b"].shape, reader.tensors["b"].dtype) == ((), "BF16")
    assert reader.tensors["a"].shard == "model.safetensors"
    assert reader.bytes_read == 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(data=st.data())
def test_a_slice_is_what_indexing_gives_and_only_its_bytes_count(write_checkpoint, data):
    def part(size):
        return st.none() | st.tuples(st.integers(0, size), st.integers(0, size)).map(
            lambda ends: tuple(sorted(ends))
        )

    reader = CheckpointReader(write_checkpoint({"a": MATRIX, "b": MATRIX[0]}))
    rows, cols = data.draw(part(6)), data.draw(part(7))
    expected = MATRIX[slice(*(rows or (None,))), slice(*(cols or (None,)))]
    assert torch.equal(reader.read("a", rows, cols), expected)
    assert reader.bytes_read == expected.numel() * 4 == reader.nbytes("a", rows, cols)
    assert torch.equal(reader.read("b", cols), MATRIX[0, slice(*(cols or (None,)))])


def test_a_scalar_of_dimension_zero_is_read_whole(write_checkpoint):
    reader = CheckpointReader(write_checkpoint({"scale": torch.tensor(0.25)}))
    value = reader.read("scale")
    assert value.shape == () and value.item() == 0.25
    assert reader.bytes_read == 4


@pytest.mark.parametrize("part", [{"rows": (0, 7)}, {"cols": (5, 4)}, {"rows": (-1, 2)}])
def test_a_part_outside_of_the_tensor_is_an_error_with_its_name(write_checkpoint, part):
    reader = CheckpointReader(write_checkpoint({"some.weight": MATRIX}))
    with pytest.raises(ValueError, match=r"some\.weight.*outside of shape \(6, 7\)"):
        reader.read("some.weight", **part)


def test_columns_of_a_vector_are_an_error(write_checkpoint):
    reader = CheckpointReader(write_checkpoint({"norm": MATRIX[0]}))
    with pytest.raises(ValueError, match="dimension 1 is outside"):
        reader.read("norm", cols=(0, 1))


def test_shards_are_read_through_the_index(write_checkpoint):
    path = write_checkpoint(shards={FIRST: {"a": MATRIX}, SECOND: {"b": -MATRIX, "c": MATRIX}})
    reader = CheckpointReader(path)
    assert list(reader.tensors) == ["a", "b", "c"]
    assert torch.equal(reader.read("b", (2, 4)), -MATRIX[2:4])


def test_only_touched_pages_become_resident(write_checkpoint):
    """A slice of a big file costs its own pages, not the file's."""
    path = write_checkpoint({"big": torch.ones(64, 1 << 20, dtype=torch.uint8)})
    reader = CheckpointReader(path)
    before = _resident_file_bytes()
    assert int(reader.read("big", (40, 41)).sum()) == 1 << 20
    assert _resident_file_bytes() - before < 16 << 20


def test_pages_that_were_read_leave_memory_again(write_checkpoint, monkeypatch):
    monkeypatch.setattr(reader_module, "REMAP_BYTES", 8 << 20)
    path = write_checkpoint({"big": torch.ones(64, 1 << 20, dtype=torch.uint8)})
    reader = CheckpointReader(path)
    before = _resident_file_bytes()
    for row in range(64):
        assert int(reader.read("big", (row, row + 1)).sum()) == 1 << 20
    assert _resident_file_bytes() - before < 24 << 20
    assert reader.bytes_read == 64 << 20


def _resident_file_bytes() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssFile"))


def test_an_empty_directory_names_the_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"shard model\.safetensors is missing"):
        CheckpointReader(tmp_path)


def test_the_index_names_a_missing_shard(write_checkpoint):
    path = write_checkpoint(shards={FIRST: {"a": MATRIX}, SECOND: {"b": MATRIX}})
    (path / SECOND).unlink()
    with pytest.raises(CheckpointError, match=f"shard {SECOND} is missing"):
        CheckpointReader(path)


def test_a_shard_that_the_index_does_not_name(write_checkpoint):
    path = write_checkpoint(shards={FIRST: {"a": MATRIX}})
    save_file({"b": MATRIX}, path / "stray.safetensors")
    with pytest.raises(CheckpointError, match=r"stray\.safetensors does not belong"):
        CheckpointReader(path)


def test_all_contradictions_of_index_and_shards_come_in_one_error(write_checkpoint):
    path = write_checkpoint(shards={FIRST: {"a": MATRIX, "x": MATRIX}, SECOND: {"b": MATRIX}})
    names = ("b", "a", "extra")
    save_file({name: MATRIX.clone() for name in names}, path / SECOND)
    index = {"a": FIRST, "x": SECOND, "b": SECOND, "gone": SECOND}
    (path / INDEX).write_text(json.dumps({"weight_map": index}))
    with pytest.raises(CheckpointError) as error:
        CheckpointReader(path)
    message = str(error.value)
    assert f"tensor a is both in {FIRST} and in {SECOND}" in message
    assert f"tensor x is in {FIRST}, but {INDEX} says {SECOND}" in message
    assert f"tensor gone is in {INDEX} but not in its shard {SECOND}" in message
    assert f"tensor extra is in {SECOND} but not in {INDEX}" in message


def test_a_truncated_shard_is_named(write_checkpoint):
    path = write_checkpoint({"a": MATRIX})
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[:-4])
    with pytest.raises(CheckpointError, match=r"shard model\.safetensors cannot be read"):
        CheckpointReader(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "not valid JSON"), ("[]", "JSON object"), ('{"weight_map": {}}', "no weight_map")],
)
def test_a_broken_index_is_an_error(write_checkpoint, content, message):
    path = write_checkpoint({"a": MATRIX})
    (path / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(path)


def test_a_dtype_that_never_holds_weights_is_an_error(write_checkpoint):
    path = write_checkpoint({"a": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(CheckpointError, match="tensor a has dtype C64"):
        CheckpointReader(path)
