"""Uploads that bring no news are left out, and nothing else."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm._torch.host_staging import HostStaging

VALUES = st.lists(st.integers(-3, 3), min_size=1, max_size=3)
COPIES = st.lists(st.tuples(st.integers(0, 2), VALUES), max_size=30)


@given(copies=COPIES, skip=st.booleans())
def test_buffers_hold_what_was_copied_last(copies, skip) -> None:
    """Three views of one buffer, partly over each other, against plain assignment."""
    buffer, expected = torch.zeros(2, 5, dtype=torch.int32).unbind(0)
    buffer, staging = buffer.clone(), HostStaging(skip_unchanged=skip)
    for start, values in copies:
        staging.copy_if_changed(buffer[start:], values)
        expected[start : start + len(values)] = torch.tensor(values, dtype=torch.int32)
        assert torch.equal(buffer, expected)
    assert staging.num_uploads <= len(copies)
    if not skip:
        assert staging.num_uploads == len(copies)


def test_the_same_values_are_copied_once_per_buffer() -> None:
    staging = HostStaging()
    first, second = (torch.zeros(4, dtype=torch.int64) for _ in range(2))
    for _ in range(5):
        staging.copy_if_changed(first, [1, 2])
        staging.copy_if_changed(second, [1, 2])
    assert staging.num_uploads == 2
    staging.copy_if_changed(first, [1, 2, 3])
    staging.copy_if_changed(first, [1, 2])
    assert staging.num_uploads == 4


def test_a_new_tensor_of_nothing_is_no_upload() -> None:
    staging = HostStaging()
    assert staging.upload([], torch.device("cpu")).shape == (0,)
    assert staging.upload([7, 8], torch.device("cpu")).tolist() == [7, 8]
    assert staging.num_uploads == 1
