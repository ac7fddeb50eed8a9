"""Every published kind of drafter loads, scaled down and with random weights, and runs a round as PyPI dflash's model does."""

import pathlib

import dflash.model
import pytest
import torch
from published_configs import ROWS, config_json, readme_row
from test_drafter import one_thread, relative, save  # noqa: F401  a fixture
from torch import nn
from transformers import Qwen3Config

from torch_dflash2 import DFlashDraftModel

README = pathlib.Path(__file__).parents[1] / "README.md"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.target)
def test_loads_and_runs_a_round(device, row, tmp_path):
    config = config_json(row)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = getattr(dflash.model, config["architectures"][0])(Qwen3Config(**config)).eval().requires_grad_(False)
        for p in theirs.parameters():
            p.copy_(torch.randn_like(p) / p.shape[-1] ** 0.5 if p.dim() > 1 else 1 + 0.1 * torch.randn_like(p))
    drafter = DFlashDraftModel.from_pretrained(save(tmp_path, config, theirs.state_dict()), device=device)
    assert type(drafter).__name__ == config["architectures"][0]
    assert (row.window is None or drafter.window == row.window // 64) and drafter.block_size == (row.block_size or 8)

    g = torch.Generator().manual_seed(1)
    hidden_size, taps = config["hidden_size"], 3 * config["hidden_size"]
    embedding, head = torch.randn(211, hidden_size, generator=g), nn.Linear(hidden_size, 211, bias=False).requires_grad_(False)
    head.weight.copy_(torch.randn(211, hidden_size, generator=g) / hidden_size**0.5)
    prompt, verified = torch.randn(1, 45, taps, generator=g), torch.randn(1, drafter.block_size, taps, generator=g)
    cache = drafter.make_cache()
    drafter.prefill_context(cache, drafter.context_features(prompt.to(device)))
    accepted = torch.tensor([3], dtype=torch.int32, device=device)
    drafter.commit_context(cache, drafter.context_features(verified.to(device)), accepted)
    anchor = torch.tensor([7])
    hidden = drafter(drafter.embed_block(embedding.to(device), anchor.to(device)), cache)

    block = torch.tensor([[7] + [drafter.mask_token_id] * (drafter.block_size - 1)])
    want = theirs(
        target_hidden=torch.cat([prompt, verified[:, :3]], 1),
        noise_embedding=embedding[block],
        position_ids=torch.arange(48 + drafter.block_size)[None],
    )
    assert relative(hidden, want) < 2e-2
    want_logits = theirs.compute_logits(want[:, 1:], head)
    head.to(device)
    assert relative(drafter.logits(hidden[:, 1:], head), want_logits) < 2e-2
    drafts = drafter.propose(hidden[:, 1:], anchor.to(device), head)
    assert drafts.shape == (1, drafter.block_size - 1) and ((drafts >= 0) & (drafts < 211)).all()


def test_the_readme_shows_these_rows():
    section = README.read_text().split("\n## Drafters\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines] == [readme_row(row) for row in ROWS]
