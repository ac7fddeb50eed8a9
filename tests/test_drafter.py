"""The drafters against PyPI dflash's with the same weights, what they load and what they refuse."""

import json
import math
import re
import sys
import types

import dflash.model
import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_cache import NoHostRead
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

import torch_dflash2
from torch_dflash2 import DFlash2DraftModel, DFlashDraftModel, Sampling
from torch_dflash2 import cache as cache_module
from torch_dflash2.drafter import DraftConfig

VOCABULARY, HIDDEN, TAPS = 97, 48, 3


def config_json(window=24, **changes):
    config = {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 40,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": ["sliding_attention"] * 2,
        "use_sliding_window": True,
        "sliding_window": window,
        "max_window_layers": 0,
        "is_causal": False,
        "num_target_layers": 12,
        "dflash_config": {
            "block_size": 8,
            "mask_token_id": 3,
            "target_layer_ids": [1, 5, 9],
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 8,
            "selector_top_k": 6,
        },
    }
    for name, value in changes.items():
        place = config["dflash_config"] if name in config["dflash_config"] or name in DRAFT_ONLY else config
        if value is REMOVED:
            place.pop(name, None)
        else:
            place[name] = value
    return config


REMOVED = object()
DRAFT_ONLY = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
DFLASH_1 = {
    "architectures": ["DFlashDraftModel"],
    "is_causal": REMOVED,
    **dict.fromkeys(("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"), REMOVED),
}
FULL_ONLY = DFLASH_1 | {"layer_types": REMOVED, "use_sliding_window": False, "sliding_window": None, "max_window_layers": 28}
MIXED = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
KINDS = {
    "DFlash 2": {},
    "DFlash 2, causal": {"is_causal": True},
    "DFlash 2, causal by default, some layers full": {"is_causal": REMOVED, **MIXED},
    "DFlash 1, sliding layers causal, full one not": DFLASH_1 | MIXED,
    "DFlash 1, full attention, blocks of 16": FULL_ONLY | {"block_size": 16},
    "DFlash 1, causal": DFLASH_1 | MIXED | {"is_causal": True},
    "DFlash 1, not causal": DFLASH_1 | MIXED | {"is_causal": False},
    "yarn": DFLASH_1 | MIXED | {"rope_parameters": YARN | {"rope_theta": 300.0, "original_max_position_embeddings": 16}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.5}},
    "output multiplier and softcap": FULL_ONLY | {"output_multiplier": 0.7, "final_logit_softcapping": 1.5},
}


def published(config, seed=0):
    """PyPI dflash's model with random weights that let every part of it matter."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(dflash.model, config["architectures"][0])(Qwen3Config(**config)).eval()
        for name, p in model.named_parameters():
            if name.endswith("norm.weight"):
                p.data = 1 + 0.3 * torch.randn_like(p)
            elif "base_kernel" in name:  # near what a trained one is: mostly the row itself
                p.data = 0.3 * torch.randn_like(p)
                p.data[:, 0] += 1
            else:
                p.data = torch.randn_like(p) * (0.3 if "kernel_projection" in name else 1) / p.shape[-1] ** 0.5
    return model.requires_grad_(False)


def ours(model, config, device="cpu"):
    drafter = getattr(torch_dflash2, config["architectures"][0])(DraftConfig.from_dict(config))
    drafter.load_published({name: p.clone() for name, p in model.state_dict().items()})
    return drafter.to(device)


def tied_target(seed=1):
    g = torch.Generator().manual_seed(seed)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False).requires_grad_(False)
    head.weight.copy_(torch.randn(VOCABULARY, HIDDEN, generator=g) / HIDDEN**0.5)
    return torch.randn(VOCABULARY, HIDDEN, generator=g), head


class PublishedLane:
    """One sequence drafted by PyPI dflash's model: driven as its own generation loop drives it."""

    def __init__(self, model, embedding):
        self.model, self.embedding = model, embedding
        self.cache = dflash.model._make_cache(model.config)
        self.start, self.pending = 0, torch.zeros(1, 0, TAPS * HIDDEN)

    def commit(self, taps):
        self.pending = torch.cat([self.pending, taps[None]], 1)
        self.start += taps.shape[0]

    @torch.no_grad()
    def draft(self, anchor, rows):
        block = torch.tensor([[anchor] + [self.model.mask_token_id] * (rows - 1)])
        scale = dflash.model._draft_value(self.model.config, "input_embedding_scale", 1.0)
        hidden = self.model(
            target_hidden=self.pending,
            noise_embedding=self.embedding[block] * scale,
            position_ids=torch.arange(self.start - self.pending.shape[1], self.start + rows)[None],
            past_key_values=self.cache,
            use_cache=True,
        )
        dflash.model._crop_to(self.cache, self.start)
        self.pending = self.pending[:, :0]
        return hidden


def float32_operators():
    """The operators' order and mask, without their rounding."""

    def pack_attention(ring_keys, ring_values, queries, keys, values, lengths, positions):
        lanes, _, window, _ = ring_keys.shape
        packed = []
        for ring, current in ((ring_keys, keys), (ring_values, values)):
            rows = []
            for lane in range(lanes):
                position, length = int(positions[lane]), int(lengths[lane])
                newest_first = [ring[lane, :, (position - 1 - age) % window] for age in range(window - 1)]
                history = torch.stack(newest_first, 1)
                history[:, max(0, length) :] = 0
                rows.append(torch.cat([current[lane].transpose(0, 1), history], 1))
            packed.append(torch.stack(rows))
        return queries.transpose(1, 2).contiguous(), *packed

    def fill_attention_mask(lengths, q_heads, rows, window, *, causal=False):
        mask = torch.zeros(len(lengths), q_heads, rows, window - 1 + rows, device=lengths.device)
        for lane, length in enumerate(lengths.tolist()):
            for row in range(rows):
                mask[lane, :, row, rows + min(length, window - 1 - row) :] = float("-inf")
                mask[lane, :, row, row + 1 if causal else rows : rows] = float("-inf")
        return mask

    def commit_kv(keys, values, counts, positions, ring_keys, ring_values):
        for ring, new in ((ring_keys, keys), (ring_values, values)):
            for lane, count in enumerate(counts.tolist()):
                for i in range(min(count, new.shape[1])):
                    ring[lane, :, (int(positions[lane]) + i) % ring.shape[2]] = new[lane, i]

    return types.SimpleNamespace(pack_attention=pack_attention, fill_attention_mask=fill_attention_mask, commit_kv=commit_kv)


def relative(got, want):
    return ((got.cpu().float() - want).norm() / want.norm()).item()


def compare_rounds(device, window, rounds, tolerance, *, in_float32=False, lanes=3, seed=0, **changes):
    """Random rounds in lanes of different lengths against each lane alone in PyPI dflash's model."""
    config = config_json(window, **changes)
    model = published(config, seed)
    drafter = ours(model, config, device)
    embedding, head = tied_target()
    heads = {"cpu": head, device: nn.Linear(HIDDEN, VOCABULARY, bias=False, device=device).requires_grad_(False)}
    heads[device].weight.copy_(head.weight)
    theirs = [PublishedLane(model, embedding) for _ in range(lanes)]
    cache = drafter.make_cache(lanes)
    if in_float32:
        cache._rings = [ring.float() for ring in cache._rings]
    g = torch.Generator().manual_seed(seed)
    random = lambda low, high: int(torch.randint(low, high + 1, (1,), generator=g))  # noqa: E731

    prompts = [1, window + 7, window - 1][:lanes]
    taps = torch.randn(lanes, max(prompts), TAPS * HIDDEN, generator=g)
    lengths = torch.tensor(prompts, dtype=torch.int32, device=device)
    drafter.prefill_context(cache, drafter.context_features(taps.to(device)), lengths)
    for lane, n in enumerate(prompts):
        theirs[lane].commit(taps[lane, :n])

    worst, agreed, drafted = 0.0, 0, 0
    for _ in range(rounds):
        rows = random(2, max(9, drafter.block_size))
        anchors = torch.randint(VOCABULARY, (lanes,), generator=g)
        hidden = drafter(drafter.embed_block(embedding.to(device), anchors.to(device), rows), cache)
        logits = drafter.logits(hidden[:, 1:], heads[device])
        tokens = drafter.propose(hidden[:, 1:], anchors.to(device), heads[device])
        assert tokens.shape == (lanes, rows - 1) and tokens.dtype == torch.int64
        for lane in range(lanes):
            want = theirs[lane].draft(int(anchors[lane]), rows)
            worst = max(worst, relative(hidden[lane], want[0]))
            worst = max(worst, relative(logits[lane], model.compute_logits(want[:, 1:], head)[0]))
            if isinstance(drafter, DFlash2DraftModel):
                picked, _, _ = model.propose(want[:, 1:], anchors[lane : lane + 1], head, 0.0)
            else:
                picked = model.compute_logits(want[:, 1:], head).argmax(-1)
            agreed, drafted = agreed + int((picked[0] == tokens[lane].cpu()).sum()), drafted + rows - 1
        taps = torch.randn(lanes, rows, TAPS * HIDDEN, generator=g)
        counts = [random(0, rows) for _ in range(lanes)]
        counts_on_device = torch.tensor(counts, dtype=torch.int32, device=device)
        drafter.commit_context(cache, drafter.context_features(taps.to(device)), counts_on_device)
        for lane, n in enumerate(counts):
            theirs[lane].commit(taps[lane, :n])
    assert cache.token_counts.tolist() == [lane.start for lane in theirs]
    assert min(lane.start for lane in theirs) > 2 * window  # the rings went round several times
    assert worst < tolerance
    return agreed / drafted


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """With tensors as small as these, threads spend their time waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def unrounded(monkeypatch):
    monkeypatch.setattr(cache_module, "ops", float32_operators())


@pytest.fixture
def small_steps(monkeypatch):
    """So that rings of full attention grow within a few rounds."""
    monkeypatch.setattr(cache_module, "GROWTH", 32)


# ---- the same hidden states, logits and drafts as PyPI dflash


@pytest.mark.parametrize("window", [24, 37])
def test_drafts_as_published(device, window):
    compare_rounds(device, window, rounds=36, tolerance=2e-2)


@pytest.mark.parametrize("window", [24, 37])
def test_drafts_exactly_as_published_without_rounding(device, window, unrounded):
    agreement = compare_rounds(device, window, rounds=36, tolerance=1e-5, in_float32=True, seed=window)
    assert agreement == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_drafts_as_published(device, kind, small_steps):
    compare_rounds(device, 13, rounds=20, tolerance=2e-2, lanes=2, **KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_drafts_exactly_as_published_without_rounding(device, kind, unrounded, small_steps):
    agreement = compare_rounds(device, 13, rounds=20, tolerance=1e-5, in_float32=True, lanes=2, seed=1, **KINDS[kind])
    assert agreement == 1.0


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"conv_kernel_size": 3, "conv_group_size": 8},
        {"conv_kernel_size": 1},
        {"num_key_value_heads": 4},
        {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 256},
        {"input_embedding_scale": 2.5, "output_multiplier": 0.7, "final_logit_softcapping": 1.5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}, "rms_norm_eps": 0.01},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_every_field_of_the_config_as_published(changes, unrounded):
    agreement = compare_rounds("cpu", 11, rounds=20, tolerance=1e-5, in_float32=True, lanes=2, **changes)
    assert agreement == 1.0


def test_far_positions_keep_their_precision(device, unrounded):
    """RoPE is exact past what bfloat16 and float16 can count to, in every dtype that the model is moved through."""
    config = config_json(11)
    model = published(config)
    drafter = ours(model, config, device).to(torch.bfloat16).to(torch.float32)
    drafter.load_published({name: p.clone() for name, p in model.state_dict().items()})
    drafter.to(device)
    cache, embedding = drafter.make_cache(), tied_target()[0]
    cache._rings = [ring.float() for ring in cache._rings]
    theirs = PublishedLane(model, embedding)
    taps = torch.randn(1, 3001, TAPS * HIDDEN, generator=torch.Generator().manual_seed(0))
    theirs.commit(taps[0])
    drafter.prefill_context(cache, drafter.context_features(taps.to(device)))
    hidden = drafter(drafter.embed_block(embedding.to(device), torch.tensor([5], device=device)), cache)
    assert relative(hidden, theirs.draft(5, 8)) < 1e-5


def test_bfloat16_weights(device):
    config = config_json()
    model = published(config)
    drafter = ours(model, config, device).to(torch.bfloat16)
    assert drafter.dtype == torch.bfloat16 and drafter.rope_frequencies.dtype == torch.float32
    cache, (embedding, head) = drafter.make_cache(), tied_target()
    theirs = PublishedLane(model, embedding)
    taps = torch.randn(1, 61, TAPS * HIDDEN, generator=torch.Generator().manual_seed(0))
    theirs.commit(taps[0])
    drafter.prefill_context(cache, drafter.context_features(taps.to(device)))
    hidden = drafter(drafter.embed_block(embedding.to(device), torch.tensor([5], device=device)), cache)
    logits = drafter.logits(hidden, head.to(device, torch.float32))
    assert hidden.dtype == torch.bfloat16 and logits.dtype == torch.float32
    assert relative(hidden, theirs.draft(5, 8)) < 5e-2


def test_propose_picks_what_the_published_selector_picks(device):
    config = config_json(selector_top_k=16)
    model, (_, head) = published(config), tied_target()
    model.candidate_selector.predecessor_codebook.weight.mul_(20)  # so that the path decides and not the logits alone
    drafter = ours(model, config, device)
    head_there = nn.Linear(HIDDEN, VOCABULARY, bias=False, device=device).requires_grad_(False)
    head_there.weight.copy_(head.weight)
    g = torch.Generator().manual_seed(0)
    by_logits = 0
    for rows in (1, 2, 7, 15):
        hidden = torch.randn(4, rows, HIDDEN, generator=g)
        anchors = torch.randint(VOCABULARY, (4,), generator=g)
        want, _, _ = model.propose(hidden, anchors, head, 0.0)
        got = drafter.propose(hidden.to(device), anchors.to(device), head_there)
        assert torch.equal(got.cpu(), want)
        by_logits += (want == head(hidden).argmax(-1)).sum().item()
    assert by_logits < 80


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.5), Sampling(0.9, top_p=0.8, top_k=20)], ids=str)
@pytest.mark.parametrize("kind", ["DFlash 2", "output multiplier and softcap"])
def test_sample_draws_what_the_published_model_draws(kind, sampling):
    """From one random state, token for token."""
    config = config_json(**KINDS[kind])
    model, (_, head) = published(config), tied_target()
    drafter, g = ours(model, config), torch.Generator().manual_seed(0)
    for rows in (1, 2, 7, 15):
        hidden = torch.randn(4, rows, HIDDEN, generator=g)
        anchors = torch.randint(VOCABULARY, (4,), generator=g)
        with torch.random.fork_rng():
            torch.manual_seed(rows)
            if kind == "DFlash 2":
                ids, candidates, probabilities = model.propose(hidden, anchors, head, sampling.temperature)
            else:
                logits = model.compute_logits(hidden, head)
                probabilities = dflash.model._sampling_probs(logits, sampling.temperature, sampling.top_p, sampling.top_k)
                ids, candidates = dflash.model._sample_probs(probabilities), None
            torch.manual_seed(rows)
            drafts = drafter.sample(hidden, anchors, head, sampling)
        assert torch.equal(drafts.token_ids, ids)
        assert drafts.candidates is candidates or torch.equal(drafts.candidates, candidates)
        torch.testing.assert_close(drafts.probabilities, probabilities, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["DFlash 2", "DFlash 1, full attention, blocks of 16"])
def test_sample_follows_its_generator_and_the_temperature(device, kind):
    config = config_json(**KINDS[kind])
    drafter, head = ours(published(config), config, device), tied_target()[1].to(device)
    hidden = torch.randn(3, 5, HIDDEN, generator=torch.Generator().manual_seed(0)).to(device)
    anchors = torch.tensor([1, 2, 3], device=device)

    def draw(temperature, seed):
        generator = torch.Generator(device).manual_seed(seed)
        return drafter.sample(hidden, anchors, head, Sampling(temperature, generator=generator))

    once, again, other = draw(1.0, 1), draw(1.0, 1), draw(1.0, 2)
    assert torch.equal(once.token_ids, again.token_ids) and not torch.equal(once.token_ids, other.token_ids)
    assert once.token_ids.dtype == torch.int64 and once.probabilities.dtype == torch.float32
    torch.testing.assert_close(once.probabilities.sum(-1).cpu(), torch.ones(3, 5))
    assert torch.equal(draw(1e-6, 3).token_ids, drafter.propose(hidden, anchors, head))


# ---- context


def test_taps_are_the_outputs_of_their_layers(device):
    drafter = ours(published(config_json()), config_json(), device)
    states = torch.randn(13, 2, 5, HIDDEN, generator=torch.Generator().manual_seed(0)).to(device)
    picked = torch.cat([states[2], states[6], states[10]], -1)  # hidden_states[0] is the embeddings
    assert torch.equal(drafter.context_features(list(states)), drafter.context_features(picked))
    assert torch.equal(drafter.context_features(tuple(states)), drafter.context_features(picked))


@pytest.mark.parametrize("window", [9, 24])
def test_prefill_equals_commits(device, window):
    """A prompt of any length, however it is split."""
    drafter = ours(published(config_json(window)), config_json(window), device)
    g = torch.Generator().manual_seed(0)
    for tokens in (1, window - 1, window, window + 1, 3 * window + 5):
        features = torch.randn(2, tokens, HIDDEN, generator=g).to(device)
        lengths = torch.tensor([tokens, tokens // 2], dtype=torch.int32, device=device)
        whole, split, committed = (drafter.make_cache(2) for _ in range(3))
        drafter.prefill_context(whole, features, lengths)
        cut = tokens // 3
        drafter.prefill_context(split, features[:, :cut], lengths)
        drafter.prefill_context(split, features[:, cut:], lengths - lengths.clamp(max=cut))
        for start in range(0, tokens, 5):
            chunk = features[:, start : start + 5]
            drafter.commit_context(committed, chunk, lengths - start)
        assert whole.token_counts.tolist() == split.token_counts.tolist() == committed.token_counts.tolist() == lengths.tolist()
        block = torch.randn(2, 4, HIDDEN, generator=g).to(device)
        want = drafter(block, whole).cpu()
        # A matrix product of another number of rows may round one bfloat16 the other way.
        assert relative(drafter(block, split), want) < 5e-3 and relative(drafter(block, committed), want) < 5e-3
        assert (drafter(block, whole).cpu() == want).all()  # drafting changes nothing


def test_long_prompt_costs_the_window_alone(device):
    drafter = ours(published(config_json(9)), config_json(9), device)
    seen = []
    drafter.layers[0].self_attn.k_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    cache = drafter.make_cache()
    drafter.prefill_context(cache, torch.randn(1, 400, HIDDEN).to(device))
    assert seen == [9] and cache.token_counts.tolist() == [400]


def test_full_layers_of_a_long_prompt_see_all_of_it_and_sliding_ones_the_window(device):
    config = config_json(9, **DFLASH_1 | MIXED)
    drafter, seen = ours(published(config), config, device), []
    for layer in drafter.layers:
        layer.self_attn.k_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    cache = drafter.make_cache()
    drafter.prefill_context(cache, torch.randn(1, 300, HIDDEN).to(device))
    assert seen == [9, 9, 300] and [ring.shape[-2] for ring in cache.rings] == [9, 9, 384 + 128]


def test_a_lane_is_prefilled_and_reset_while_others_go_on(device, small_steps):
    """Each lane as if it were alone, the others' commits and a growing ring notwithstanding."""
    config = config_json(11, **DFLASH_1 | MIXED)
    drafter, g = ours(published(config), config, device), torch.Generator().manual_seed(0)
    together, alone = drafter.make_cache(3), [drafter.make_cache() for _ in range(3)]
    random = lambda *shape: torch.randn(*shape, HIDDEN, generator=g).to(device)  # noqa: E731
    for step in range(9):
        lane = step % 3
        prompt = random(1, 5 + 3 * step)
        if step > 4:
            together.lane(lane).reset()
            alone[lane].reset()
        drafter.prefill_context(together.lane(lane), prompt)
        drafter.prefill_context(alone[lane], prompt)
        features, counts = random(3, 4), torch.tensor([step % 5, 4, 1], dtype=torch.int32, device=device)
        drafter.commit_context(together, features, counts)
        block = random(3, 6)
        hidden = drafter(block, together)
        for i, cache in enumerate(alone):
            drafter.commit_context(cache, features[i : i + 1], counts[i : i + 1])
            torch.testing.assert_close(hidden[i : i + 1], drafter(block[i : i + 1], cache), rtol=5e-3, atol=5e-3)
        assert together.token_counts.tolist() == [cache.token_counts.item() for cache in alone]


def test_any_int32_is_a_safe_length(device):
    drafter = ours(published(config_json(9)), config_json(9), device)
    cache = drafter.make_cache(2)
    features = torch.randn(2, 30, HIDDEN, generator=torch.Generator().manual_seed(0)).to(device)
    drafter.prefill_context(cache, features, torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32, device=device))
    assert cache.token_counts.tolist() == [0, 30] and all((ring[:, 0] == 0).all() for ring in cache.rings)
    full = drafter.make_cache(2)
    drafter.prefill_context(full, features)
    assert all(torch.equal(a[:, 1], b[:, 1]) for a, b in zip(full.rings, cache.rings, strict=True))


def test_empty_prompt_leaves_the_cache_as_it_was(device):
    drafter = ours(published(config_json()), config_json(), device)
    cache = drafter.make_cache()
    drafter.prefill_context(cache, torch.zeros(1, 0, HIDDEN, device=device))
    assert cache.token_counts.tolist() == [0]
    hidden = drafter(torch.ones(1, 3, HIDDEN, device=device), cache)
    assert hidden.isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
def test_block_attends_in_both_directions_unless_causal(device, causal):
    config = config_json(**DFLASH_1 | {"is_causal": causal})
    drafter = ours(published(config), config, device)
    cache = drafter.make_cache()
    block = torch.randn(1, 5, HIDDEN, generator=torch.Generator().manual_seed(0)).to(device)
    before = drafter(block, cache)
    block[:, -1] += 1
    changed = (drafter(block, cache) != before).any(-1)[0].tolist()
    assert changed == ([False] * 4 if causal else [True] * 4) + [True]


# ---- how it runs


def round_of(drafter, embedding, head):
    def drafting_round(anchor_ids, cache):
        hidden = drafter(drafter.embed_block(embedding, anchor_ids, 6), cache)
        return hidden, drafter.propose(hidden[:, 1:], anchor_ids, head)

    return drafting_round


@pytest.mark.parametrize("kind", ["DFlash 2", "DFlash 1, sliding layers causal, full one not"])
def test_a_round_is_one_graph(device, kind):
    config = config_json(**KINDS[kind])
    drafter = ours(published(config), config, device)
    embedding, head = (x.to(device) for x in tied_target())
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    eager = round_of(drafter, embedding, head)
    compiled = torch.compile(eager, backend=graphs, fullgraph=True)
    commit = torch.compile(drafter.commit_context, backend=graphs, fullgraph=True)
    caches = drafter.make_cache(2), drafter.make_cache(2)
    g = torch.Generator().manual_seed(0)
    for i in range(6):
        anchors = torch.randint(VOCABULARY, (2,), generator=g).to(device)
        got, want = compiled(anchors, caches[0]), eager(anchors, caches[1])
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
        features = torch.randn(2, 6, HIDDEN, generator=g).to(device)
        counts = torch.randint(0, 7, (2,), generator=g).int().to(device)
        commit(caches[0], features, counts)
        drafter.commit_context(caches[1], features, counts)
        torch.testing.assert_close(caches[0].rings, caches[1].rings, rtol=1e-2, atol=1e-2)
        assert torch.equal(caches[0].token_counts, caches[1].token_counts) and caches[0].longest == caches[1].longest
        assert torch.equal(caches[0].mask(2, 6), caches[1].mask(2, 6))
        if i == 1:  # from then on `longest` is a number that may change
            compiled_for_good = graphs.frame_count
    assert graphs.frame_count == compiled_for_good <= 3


@pytest.mark.parametrize("kind", ["DFlash 2", "DFlash 1, sliding layers causal, full one not"])
def test_a_drafting_round_compiles_beside_eager_commits(kind):
    """With inductor, in inference mode, as decoding does it: no recompilation after two rounds, no copy of a ring."""
    config = config_json(37, **KINDS[kind])
    drafter = ours(published(config), config)
    embedding, head = tied_target()
    torch._dynamo.reset()
    eager = round_of(drafter, embedding, head)
    compiled = torch.compile(eager, fullgraph=True)
    cache, g = drafter.make_cache(2), torch.Generator().manual_seed(0)
    halves = {2 * ring[0].numel() for ring in cache.rings} | {ring[0].numel() for ring in cache.rings}
    with torch.inference_mode():
        for i in range(5):
            anchors = torch.randint(VOCABULARY, (2,), generator=g)
            if i == 0:
                got, code = run_and_get_code(compiled, anchors, cache)
                allocated = re.findall(r"empty_strided\w*\(\(([\d, ]+)\)", "".join(code))
                assert allocated and not {math.prod(map(int, re.findall(r"\d+", sizes))) for sizes in allocated} & halves
            else:
                with torch._dynamo.config.patch(error_on_recompile=i >= 2):
                    got = compiled(anchors, cache)
            want = eager(anchors, cache)
            torch.testing.assert_close(got[0], want[0], rtol=1e-2, atol=1e-2)
            assert torch.equal(got[1], want[1])
            drafter.commit_context(cache, torch.randn(2, 6, HIDDEN, generator=g), torch.tensor([i, 6], dtype=torch.int32))


def test_a_ring_that_grows_is_compiled_for_once(device, small_steps):
    config = config_json(**FULL_ONLY)
    drafter = ours(published(config), config, device)
    embedding, head = (x.to(device) for x in tied_target())
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    eager = round_of(drafter, embedding, head)
    compiled = torch.compile(eager, backend=graphs, fullgraph=True)
    cache, g, sizes = drafter.make_cache(2), torch.Generator().manual_seed(0), set()
    for _ in range(16):
        anchors = torch.randint(VOCABULARY, (2,), generator=g).to(device)
        torch.testing.assert_close(compiled(anchors, cache), eager(anchors, cache), rtol=2e-2, atol=2e-2)
        features = torch.randn(2, 12, HIDDEN, generator=g).to(device)
        drafter.commit_context(cache, features, torch.tensor([3, 12], dtype=torch.int32, device=device))
        sizes.add(cache.rings[0].shape[-2])
    assert len(sizes) > 3 and graphs.frame_count == 2


def test_nothing_is_read_back_to_the_host(device):
    config = config_json(9, is_causal=REMOVED, **MIXED)
    drafter = ours(published(config), config, device)
    embedding, head = (x.to(device) for x in tied_target())
    drafting_round, cache = round_of(drafter, embedding, head), drafter.make_cache(2)
    taps = torch.randn(2, 30, TAPS * HIDDEN).to(device)
    lengths, counts = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([30, 4], [6, 0]))
    anchors = torch.tensor([5, 6], device=device)
    with NoHostRead():
        features = drafter.context_features(taps)
        drafter.prefill_context(cache, features, lengths)
        drafting_round(anchors, cache)
        drafter.prefill_context(cache.lane(1), features[1:])
        cache.reset(1)
        drafter.commit_context(cache, features[:, :6], counts)
    assert cache.token_counts.tolist() == [36, 0]


def test_no_gradients_are_kept(device):
    drafter = ours(published(config_json()), config_json(), device)
    cache = drafter.make_cache()
    taps = torch.randn(1, 4, TAPS * HIDDEN, device=device, requires_grad=True)
    drafter.prefill_context(cache, drafter.context_features(taps))
    assert not drafter(torch.ones(1, 3, HIDDEN, device=device), cache).requires_grad


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda d, c, x: d(x[:, :, :-1], c),
            r"forward: block_embeddings: expected shape \[2, any, 48\], got \[2, 3, 47\]",
        ),
        (lambda d, c, x: d(x[:1], c), r"forward: block_embeddings: expected shape \[2, any, 48\], got \[1, 3, 48\]"),
        (
            lambda d, c, x: d(x, small_drafter(9).make_cache(2)),
            r"forward: cache: expected .* \(24, 24\), .*got .* \(9, 9\), .*make_cache",
        ),
        (lambda d, c, x: d.commit_context(c, x[0], None), "commit_context: features: expected shape"),
        (lambda d, c, x: d.commit_context(small_drafter(9).make_cache(2), x, None), "commit_context: cache: expected"),
        (lambda d, c, x: d.prefill_context(c, x[0]), "prefill_context: features: expected shape"),
        (lambda d, c, x: d.prefill_context(small_drafter(9).make_cache(2), x), "prefill_context: cache: expected"),
        (lambda d, c, x: d.context_features([x] * 10), "context_features: hidden_states: expected at least 11.*got 10"),
        (lambda d, c, x: d.context_features(x), r"context_features: hidden_states: expected shape \[any, any, 144\]"),
        (
            lambda d, c, x: d.propose(x, torch.ones(2, 1), None),
            r"propose: anchor_ids: expected shape \[2\], got \[2, 1\]",
        ),
        (
            lambda d, c, x: d.sample(x, torch.ones(2, 1), None, Sampling()),
            r"sample: anchor_ids: expected shape \[2\], got \[2, 1\]",
        ),
        (lambda d, c, x: d.embed_block(x[0], torch.ones(2, 1)), r"embed_block: anchor_ids: expected shape \[any\]"),
        *(
            (
                lambda d, c, x, rows=rows: d.embed_block(x[0], torch.ones(2).long(), rows),
                rf"embed_block: rows: expected 2\.\.16, got {rows}",
            )
            for rows in (0, 1, 17, -1, 2.0, True)
        ),
    ],
)
def test_wrong_arguments_are_refused_and_change_nothing(call, message):
    drafter = small_drafter(24)
    cache = drafter.make_cache(2)
    with pytest.raises(ValueError, match=message):
        call(drafter, cache, torch.ones(2, 3, HIDDEN))
    assert cache.token_counts.tolist() == [0, 0] and not any(ring.any() for ring in cache.rings)
    drafter.commit_context(cache, torch.ones(2, 3, HIDDEN), torch.ones(2, dtype=torch.int32))


def small_drafter(window):
    return ours(published(config_json(window)), config_json(window))


# ---- loading


def save(folder, config, weights):
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: p.contiguous() for name, p in weights.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_loads_what_dflash_saves(tmp_path, device, dtype):
    model = published(config_json())
    model.save_pretrained(tmp_path)
    drafter = DFlash2DraftModel.from_pretrained(tmp_path, dtype=dtype, device=device)
    assert drafter.config == DraftConfig.from_dict(config_json())
    assert drafter.dtype == (dtype or torch.float32) and drafter.device.type == device and not drafter.training
    assert (drafter.block_size, drafter.mask_token_id, drafter.target_layer_ids, drafter.window) == (
        8,
        3,
        (1, 5, 9),
        24,
    )
    for name, p in drafter.state_dict().items():
        there = f"{name}.weight" if name.endswith("codebook") else name
        assert torch.equal(p.cpu(), model.state_dict()[there].to(drafter.dtype)), name


def test_loads_published_names_and_dflash_loads_ours(tmp_path):
    """Published checkpoints store the codebooks as plain tensors; dflash reads what our state dict holds."""
    config = config_json()
    weights = {name: p.bfloat16() for name, p in small_drafter(24).state_dict().items()}
    folder = save(tmp_path, config, weights)
    drafter = DFlash2DraftModel.from_pretrained(folder)
    assert drafter.dtype == torch.bfloat16
    theirs, report = dflash.model.DFlash2DraftModel.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.equal(theirs.fc.weight, drafter.fc.weight) and set(load_file(folder / "model.safetensors")) == set(
        drafter.state_dict()
    )


def test_weights_that_do_not_fit_are_all_named(tmp_path):
    weights = dict(small_drafter(24).state_dict())
    del weights["layers.1.self_attn.k_norm.weight"]
    weights["layers.0.self_attn.sinks"] = torch.zeros(4)
    weights["fc.weight"] = torch.zeros(HIDDEN, 2 * HIDDEN)
    weights["norm.weight"] = torch.zeros(HIDDEN, dtype=torch.int8)
    folder = save(tmp_path, config_json(), weights)
    with pytest.raises(ValueError, match="drafter weights do not fit the config") as error:
        DFlash2DraftModel.from_pretrained(folder)
    for fault in (
        "missing layers.1.self_attn.k_norm.weight",
        "unexpected layers.0.self_attn.sinks",
        "fc.weight: expected floats of shape [48, 144], got torch.float32 [48, 96]",
        "norm.weight: expected floats of shape [48], got torch.int8 [48]",
    ):
        assert fault in str(error.value)


@pytest.mark.parametrize("loader", [DFlashDraftModel, DFlash2DraftModel])
@pytest.mark.parametrize("kind", ["DFlash 2", "DFlash 1, sliding layers causal, full one not"])
@pytest.mark.parametrize("named", [True, False])
def test_the_config_decides_the_class(tmp_path, loader, kind, named):
    config = config_json(**KINDS[kind])
    model = published(config)
    config = {name: value for name, value in config.items() if named or name != "architectures"}
    drafter = loader.from_pretrained(save(tmp_path, config, model.state_dict()))
    assert type(drafter).__name__ == type(model).__name__
    assert isinstance(drafter, DFlashDraftModel) and torch.equal(drafter.fc.weight, model.fc.weight)


def test_a_class_refuses_the_config_of_the_other():
    for model, kind in ((DFlashDraftModel, "DFlash 2"), (DFlash2DraftModel, "DFlash 1, causal")):
        with pytest.raises(ValueError, match=rf"architectures: expected \['{model.__name__}'\]"):
            model(DraftConfig.from_dict(config_json(**KINDS[kind])))


def shard(folder, weights):
    """Two shards and their index, as Hugging Face writes them."""
    names, places = sorted(weights), {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({name: weights[name].contiguous() for name in part}, folder / file)
        places |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return places


def test_loads_shards(tmp_path):
    weights = small_drafter(24).state_dict()
    (tmp_path / "config.json").write_text(json.dumps(config_json()))
    places = shard(tmp_path, weights)
    drafter = DFlash2DraftModel.from_pretrained(tmp_path)
    assert all(torch.equal(p, weights[name]) for name, p in drafter.state_dict().items())
    (tmp_path / places["fc.weight"]).unlink()
    with pytest.raises(FileNotFoundError, match=f"expected a file .*{places['fc.weight']}, found none"):
        DFlash2DraftModel.from_pretrained(tmp_path)
    index = {"weight_map": dict.fromkeys(places, "../model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match=r"expected a file .*\.\./model.safetensors, found none"):
        DFlash2DraftModel.from_pretrained(tmp_path)
    for index in ([], {}, {"weight_map": {}}, {"weight_map": ["a"]}, {"weight_map": {"fc.weight": 1}}):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match=r"drafter folder: expected .* to name the file of each weight in weight_map"):
            DFlash2DraftModel.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"drafter config: .*config.json: expected a JSON object, got \[\]"):
        DFlash2DraftModel.from_pretrained(tmp_path)


def test_loads_from_the_hub(tmp_path, monkeypatch):
    folder, asked = save(tmp_path, config_json(), small_drafter(24).state_dict()), []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **options: asked.append((name, options)) or str(folder)
    )
    drafter = DFlash2DraftModel.from_pretrained("owner/a-drafter.b16", revision="v2")
    assert drafter.config == DraftConfig.from_dict(config_json())
    wanted = ["config.json", "*.safetensors", "*.safetensors.index.json"]
    assert asked == [("owner/a-drafter.b16", {"revision": "v2", "allow_patterns": wanted})]


def test_what_is_no_folder_and_not_on_the_hub(tmp_path, monkeypatch):
    def refuse(name, **options):
        raise huggingface_hub.errors.LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(FileNotFoundError, match="owner/name is no folder here, and the Hugging Face hub gave none: offline"):
        DFlashDraftModel.from_pretrained("owner/name")
    for source in (tmp_path / "owner/name", "name", "./owner/name", "/owner/name"):  # these can only be folders
        with pytest.raises(FileNotFoundError, match=r"drafter folder: expected a file .*config\.json, found none"):
            DFlashDraftModel.from_pretrained(source)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"owner/name is no folder here, and .* pip install 'torch_dflash2\[hub\]'"):
        DFlashDraftModel.from_pretrained("owner/name")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_folder_without_a_file(tmp_path, missing):
    save(tmp_path, config_json(), small_drafter(24).state_dict())
    (tmp_path / missing).unlink()
    with pytest.raises(FileNotFoundError, match=missing):
        DFlash2DraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_causal": 1}, "is_causal: expected true or false, got 1"),
        ({"layer_types": ["sliding_attention"]}, "layer_types: expected 2 times sliding_attention or full_attention"),
        ({"layer_types": ["sliding_attention", "linear_attention"]}, "layer_types: expected 2 times sliding_attention or"),
        ({"layer_types": "full_attention"}, "layer_types: expected 2 times sliding_attention or"),
        ({"layer_types": REMOVED, "max_window_layers": "1"}, "max_window_layers: expected a whole number, got 1"),
        ({"use_sliding_window": False}, "use_sliding_window: expected true, as layer_types has sliding_attention, got False"),
        ({"use_sliding_window": REMOVED}, "use_sliding_window: expected true, as layer_types has"),
        ({"use_sliding_window": 1}, "use_sliding_window: expected true or false, got 1"),
        ({"sliding_window": None}, "sliding_window: expected a value, as layer_types has sliding_attention, got none"),
        ({"sliding_window": 8}, "sliding_window: expected more than block_size = 8, got 8"),
        ({"sliding_window": 24.5}, "sliding_window: expected a whole number, got 24.5"),
        ({"hidden_act": "gelu"}, "hidden_act: expected silu, got gelu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: "),
        ({"attention_sinks": True}, "attention_sinks: expected no attention sinks"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: "),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_parameters.rope_type: expected that of rope_scaling, linear, got default",
        ),
        *(
            ({"rope_parameters": {"rope_type": kind, "factor": 2.0}}, f"rope_parameters.rope_type: expected .* got {kind}")
            for kind in ("dynamic", "longrope", "llama3", "proportional", "mrope")
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "factor": 4.0}},
            "rope_parameters.factor: expected nothing but what default RoPE has, got 4.0",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 32}},
            "rope_parameters.beta_fast: expected nothing but what linear RoPE has, got 32",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor: expected at least 1, got None"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 0.5}}, "rope_parameters.factor: expected at least 1, got 0.5"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "rope_parameters.factor: expected a finite number"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_parameters.rope_theta: expected a finite number above 0"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 2}},
            "rope_parameters.beta_slow: expected at most beta_fast = 1, got 2",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": "no"}},
            "rope_parameters.truncate: expected true or false, got no",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1.5}},
            "rope_parameters.original_max_position_embeddings: expected a whole number above 0, got 1.5",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor: expected nothing but what default RoPE has, got 0.5",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "default"}}},
            "rope_parameters.sliding_attention: expected nothing but what default RoPE has",
        ),
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures: expected .* got .*Qwen3ForCausalLM"),
        ({"architectures": ["DFlashDraftModel"]}, "conv_kernel_size: expected none in a DFlashDraftModel, got 2"),
        ({"attention_chunk_size": 64}, "attention_chunk_size: expected None, got 64"),
        ({"head_dim": 64}, "head_dim: expected 128 or 256, got 64"),
        ({"num_attention_heads": 3}, "num_attention_heads: expected a multiple of num_key_value_heads = 2, got 3"),
        ({"num_key_value_heads": 0}, "num_key_value_heads: expected at least 1"),
        ({"hidden_size": REMOVED}, "hidden_size: expected a value, got none"),
        ({"block_size": 1}, r"block_size: expected 2\.\.16, got 1"),
        ({"block_size": 17}, r"block_size: expected 2\.\.16, got 17"),
        ({"mask_token_id": REMOVED}, "mask_token_id: expected a value"),
        ({"mask_token_id": 97}, "mask_token_id: expected below vocab_size = 97, got 97"),
        ({"target_layer_ids": []}, "target_layer_ids: "),
        ({"target_layer_ids": [-1]}, "target_layer_ids: "),
        ({"conv_kernel_size": 0}, "conv_kernel_size: expected at least 1"),
        ({"conv_group_size": 5}, "conv_group_size: expected a divisor of hidden_size = 48, got 5"),
        ({"selector_top_k": 98}, r"selector_top_k: expected 1\.\.vocab_size = 97, got 98"),
        ({"selector_rank": REMOVED}, "selector_rank: expected a value"),
        ({"selector_top_k": "4"}, "selector_top_k: expected a whole number, got 4"),
        ({"conv_kernel_size": True}, "conv_kernel_size: expected a whole number, got True"),
        ({"block_size": 7.9}, "block_size: expected a whole number, got 7.9"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers: expected a whole number, got 2"),
        ({"attention_bias": "false"}, "attention_bias: expected true or false, got false"),
        ({"target_layer_ids": [0.0, 1.5]}, "target_layer_ids: expected whole numbers"),
        ({"target_layer_ids": 1}, "target_layer_ids: expected a list of layer numbers, got 1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a finite number, got nan"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps: expected above 0, got -1.0"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: expected None, got 50.0"),
        (
            {"rope_scaling": {"rope_type": "default", "rope_theta": 5.0}},
            "rope_parameters.rope_theta: expected that of rope_scaling, 5.0, got 10000.0",
        ),
        ({"dflash_config": [1]}, r"dflash_config: expected an object, got \[1\]"),
        ({"rope_parameters": 7}, "rope_parameters: expected an object, got 7"),
        ({"rope_scaling": "linear"}, "rope_scaling: expected an object, got linear"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_parameters.rope_type: expected default, linear or yarn"),
        ({"layer_types": [["full_attention"], {}]}, "layer_types: expected 2 times sliding_attention or full_attention"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: expected a finite number, got small"),
        ({"output_multiplier": "2"}, "output_multiplier: expected a finite number, got 2"),
        ({"final_logit_softcapping": [1]}, "final_logit_softcapping: expected a finite number"),
        ({"input_embedding_scale": True}, "input_embedding_scale: expected a finite number, got True"),
        ({"hidden_size": 10**12}, "hidden_size: expected at most 67108864, got 1000000000000"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers: expected at most 1024, got 1000000000000"),
        ({"sliding_window": 10**12}, "sliding_window: expected at most 67108864, got 1000000000000"),
        ({"target_layer_ids": REMOVED, "num_target_layers": "12"}, "num_target_layers: expected a whole number, got 12"),
        (
            {"dflash_config": {"sample_from_anchor": True}},
            "dflash_config.sample_from_anchor: expected one of block_size",
        ),
    ],
    ids=lambda x: None if isinstance(x, str) else " ".join(x),
)
def test_config_that_is_not_supported_is_refused_by_field(change, message):
    with pytest.raises(ValueError, match=f"drafter config: {message}"):
        DraftConfig.from_dict(config_json(**change))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"layer_types": REMOVED},
        {"rope_parameters": REMOVED, "rope_theta": 5000.0},
        {"rope_parameters": REMOVED},
        {"rope_parameters": {"type": "default", "rope_theta": 700.0}, "rope_theta": 5000.0},
        {"num_key_value_heads": None},
        {"head_dim": REMOVED},
        {"rms_norm_eps": REMOVED},
        {"target_layer_ids": REMOVED},
        {"target_layer_ids": REMOVED, "num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
        {
            "target_layer_ids": REMOVED,
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention"] * 5,
            "num_target_layers": 41,
        },
        {"block_size": REMOVED, "sliding_window": 40},
        {"output_multiplier": 0.5},
        {"final_logit_softcapping": 30.0},
        {"layer_types": REMOVED, "max_window_layers": 1},
        {"layer_types": REMOVED, "max_window_layers": REMOVED},
        {"layer_types": REMOVED, "use_sliding_window": False},
        {"layer_types": REMOVED, "sliding_window": None},
        {"layer_types": REMOVED, "use_sliding_window": REMOVED},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"sliding_window": REMOVED},
        {"is_causal": REMOVED, "layer_types": ["full_attention", "sliding_attention"]},
        {"is_causal": True},
        {"partial_rotary_factor": None, "quantization_config": None},
    ],
    ids=lambda change: " ".join(change) or "as published",
)
def test_config_is_read_as_dflash_reads_it(change):
    raw = config_json(**change)
    config = DraftConfig.from_dict(json.loads(json.dumps(raw)))
    model = dflash.model.DFlash2DraftModel(Qwen3Config(**raw))
    assert config.target_layer_ids == tuple(model.target_layer_ids)
    assert (config.block_size, config.mask_token_id) == (model.block_size, model.mask_token_id)
    assert config.rope.theta == model.config.rope_parameters["rope_theta"]
    attention = model.layers[0].self_attn
    assert config.head_dim == attention.head_dim
    assert config.windows == tuple(layer.self_attn.sliding_window for layer in model.layers)
    assert config.causal == tuple(layer.self_attn.is_causal for layer in model.layers)
    assert config.num_attention_heads // config.num_key_value_heads == attention.num_key_value_groups
    assert config.rms_norm_eps == model.config.rms_norm_eps
    logits = torch.linspace(-50, 50, 7)
    drafter = DFlash2DraftModel(config)
    torch.testing.assert_close(drafter.logits(logits, nn.Identity()), model.compute_logits(logits, nn.Identity()))
    assert {n.removesuffix(".weight"): p.shape for n, p in drafter.state_dict().items()} == {
        n.removesuffix(".weight"): p.shape for n, p in model.state_dict().items()
    }


def test_fields_at_the_top_level_serve_as_well():
    raw = config_json()
    assert DraftConfig.from_dict({**raw, **raw["dflash_config"], "dflash_config": {}}) == DraftConfig.from_dict(raw)


def test_rope_theta_is_found_where_a_config_keeps_it():
    scaling = config_json(rope_scaling={"rope_type": "default"}, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert DraftConfig.from_dict(scaling).rope.theta == 1e6


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 700.0, "factor": 3.5}},
        {"rope_parameters": REMOVED, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5000.0},
        {"rope_parameters": YARN},
        {"rope_parameters": YARN | {"rope_theta": 1e6, "truncate": False}},
        {"rope_parameters": YARN | {"beta_fast": 20.0, "beta_slow": 3, "attention_factor": 1.25}},
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}},
        {"rope_parameters": YARN | {"mscale": 0.7}},
        {"rope_parameters": YARN | {"factor": 1.0, "attention_factor": None}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}, "max_position_embeddings": 4096},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
        {"rope_parameters": YARN, "original_max_position_embeddings": 2048},
        {"rope_parameters": YARN | {"original_max_position_embeddings": 8, "beta_fast": 2.0}},
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [128, 256])
def test_rope_turns_as_transformers_turns(rope, head_dim):
    raw = config_json(head_dim=head_dim, **rope)
    config = DraftConfig.from_dict(json.loads(json.dumps(raw)))
    theirs = Qwen3RotaryEmbedding(Qwen3Config(**raw))
    torch.testing.assert_close(config.rope.frequencies(head_dim), theirs.inv_freq, rtol=1e-6, atol=0)
    assert config.rope.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)
