"""Linear layers with few rows: either way computes the same."""

import pytest
import torch
from torch import nn

from torch_dflash2 import few_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_layers_compute_the_same_either_way(dtype, monkeypatch):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(40, 24, bias=False), nn.Linear(24, 56, bias=False)).to(dtype)
    quick = nn.Sequential(nn.Linear(40, 24, bias=False), nn.Linear(24, 56, bias=False)).to(dtype)
    quick.load_state_dict(plain.state_dict())
    for way in (few_rows.usual, few_rows.transposed):
        monkeypatch.setattr(few_rows, "_fastest", lambda weights, rows, way=way: way)
        few_rows.use_few_row_linears(quick)
        assert all(type(module) is few_rows.FewRowLinear for module in quick)
        assert quick[0].ways == [few_rows.usual] + [way] * 16
        assert quick.state_dict().keys() == plain.state_dict().keys()
        for shape in ((1, 40), (40,), (1, 1, 40), (1, 4, 40), (2, 4, 40), (1, 9, 40), (3, 40)):
            x = torch.randn(shape, dtype=dtype)
            got = quick(x)
            assert got.is_contiguous()
            torch.testing.assert_close(got, plain(x), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)


def test_layers_with_a_bias_are_left_alone():
    layer = nn.Linear(16, 16)
    few_rows.use_few_row_linears(layer)
    assert type(layer) is nn.Linear
