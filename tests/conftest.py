import pytest

import torch_dflash2  # noqa: F401


@pytest.fixture(params=["cpu"], scope="session")
def device(request):
    return request.param
