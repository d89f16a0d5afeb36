from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=[1, 2, 3])
def number_of_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
