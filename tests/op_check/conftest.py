"""What all tests of op_check share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def threads_of_torch() -> Iterator[None]:
    """Give each test the number of threads that torch began with: `op-check` sets it for its process, and tests themselves.

    A parameter of a test stands in the place of a fixture of its name, and many have one that is named `threads`.
    """
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
