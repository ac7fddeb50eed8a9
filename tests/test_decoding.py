"""Speculative decoding against the plain loop, transformers' own generate and PyPI dflash's decoder."""

import functools
import inspect
import random

import dflash.model
import numpy as np
import pytest
import torch
import transformers
from test_cache import NoHostRead
from test_drafter import DFLASH_1, HIDDEN, config_json, float32_operators, one_thread, ours, published  # noqa: F401

from torch_dflash2 import Sampling, decoding, generate, greedy_generate
from torch_dflash2 import cache as cache_module
from torch_dflash2.decoding import default_block_size

WINDOW = 11  # of the drafter: not a power of two, and shorter than nearly every text here
VOCABULARY = 97
LAYERS = 3


def make_target(kind="Llama", seed=0, device="cpu", vocabulary=VOCABULARY, **changes):
    """A tiny random causal LM, sharp enough that no choice hangs on rounding."""
    config = getattr(transformers, f"{kind}Config")(
        **{
            "vocab_size": vocabulary,
            "hidden_size": HIDDEN,
            "intermediate_size": 64,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "initializer_range": 0.3,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            **changes,
        }
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return getattr(transformers, f"{kind}ForCausalLM")(config).eval().requires_grad_(False).to(device)


def draft_config(window=WINDOW, vocabulary=VOCABULARY, **changes):
    return config_json(window, vocab_size=vocabulary, target_layer_ids=[0, 2], num_target_layers=LAYERS, **changes)


def make_drafter(seed=0, device="cpu", **changes):
    config = draft_config(**changes)
    return ours(published(config, seed), config, device)


def make_prompt(tokens, seed=0, device="cpu", vocabulary=VOCABULARY):
    return torch.randint(vocabulary, (1, tokens), generator=torch.Generator().manual_seed(seed)).to(device)


class Prophet:
    """A drafter's propose that knows the text to come, `known` by position, and is wrong where `wrong` says so.

    It looks up where it is in the text by what was committed: a token committed twice or not at all makes it wrong.
    """

    def __init__(self, drafter, known, wrong=()):
        self.drafter, self.known, self.wrong = drafter, known, set(wrong)
        self.inner_forward = drafter.forward
        drafter.forward, drafter.propose = self.forward, self.propose

    def forward(self, embeddings, cache):
        self.position = int(cache.token_counts)
        return self.inner_forward(embeddings, cache)

    def propose(self, hidden, anchor_ids, head):
        assert anchor_ids.tolist() == [self.known[self.position]]
        first = self.position + 1
        drafts = (self.known + [0] * 16)[first : first + hidden.shape[1]]
        drafts = [(token + 1) % VOCABULARY if first + i in self.wrong else token for i, token in enumerate(drafts)]
        return torch.tensor([drafts], device=hidden.device)

    def expected_lengths(self, prompt_tokens, new_tokens, block):
        """Accepted drafts and one more a round, by counting."""
        lengths, position, end = [], prompt_tokens, prompt_tokens + new_tokens - 1
        while position < end:
            rows = min(block, end - position)
            good = 0
            while good < rows - 1 and position + 1 + good not in self.wrong:
                good += 1
            lengths.append(good + 1)
            position += good + 1
        return lengths


# ---- the tokens are the target's


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_those_of_the_plain_loop_and_of_transformers(device, kind, seed):
    target, drafter = make_target(kind, seed, device), make_drafter(seed, device)
    prompt = make_prompt(3 + 5 * seed, seed, device)
    plain = greedy_generate(target, prompt, max_new_tokens=40)
    got = generate(target, drafter, prompt, max_new_tokens=40, block_size=2 + 3 * seed)
    assert got.token_ids == plain.token_ids and got.finish_reason == plain.finish_reason == "length"
    theirs = target.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=40)
    assert theirs[0, prompt.shape[1] :].tolist() == plain.token_ids


@pytest.mark.parametrize("block,seed", [(2, 0), (3, 1), (5, 2), (7, 1), (8, 0), (8, 1)])
def test_acceptance_lengths_are_those_that_counting_gives(device, block, seed):
    target, drafter = make_target(seed=seed, device=device), make_drafter(device=device)
    prompt = make_prompt(4, seed, device)
    plain = greedy_generate(target, prompt, max_new_tokens=50)
    known = prompt[0].tolist() + plain.token_ids
    wrong = random.Random(seed).sample(range(len(known)), [0, 12, 40][seed])
    prophet = Prophet(drafter, known, wrong)
    streamed = []
    got = generate(target, drafter, prompt, max_new_tokens=50, block_size=block, on_tokens=streamed.append)
    assert got.token_ids == plain.token_ids
    assert got.stats.acceptance_lengths == prophet.expected_lengths(4, 50, block)
    assert [len(tokens) for tokens in streamed] == [1, *got.stats.acceptance_lengths]
    assert sum(streamed, []) == got.token_ids


@pytest.mark.parametrize("in_float32", [True, False])
@pytest.mark.parametrize("vocabulary,seed", [(7, 5), (7, 9), (11, 1), (11, 10)])  # texts that do not settle on one token
def test_rounds_are_those_of_the_authors_decoder(monkeypatch, in_float32, vocabulary, seed):
    """Among few tokens even random drafts are right at times. With unrounded operators every round must go the same way."""
    monkeypatch.setattr(dflash.model, "_cuda_time", lambda: 0.0)
    target = make_target("Qwen3", seed, vocabulary=vocabulary)
    config = draft_config(vocabulary=vocabulary)
    model = published(config, seed)
    drafter = ours(model, config)
    if in_float32:
        monkeypatch.setattr(cache_module, "ops", float32_operators())
        cache = drafter.make_cache()
        cache._rings = [ring.float() for ring in cache._rings]
        drafter.make_cache = lambda lanes: cache
    prompt = make_prompt(5 + 9 * (seed % 3), seed, vocabulary=vocabulary)
    got = generate(target, drafter, prompt, max_new_tokens=60, block_size=5)
    theirs = dflash.model.dflash_generate(model, target, prompt, 60, None, block_size=5, return_stats=True)
    assert theirs.output_ids[0, prompt.shape[1] :].tolist() == got.token_ids
    assert got.stats.rounds < 55  # drafts were accepted
    if in_float32:  # but for the end, where the authors' decoder drafts fewer rows and ours verifies fewer
        settled = len(theirs.acceptance_lengths) - 5
        assert got.stats.acceptance_lengths[:settled] == theirs.acceptance_lengths[:settled]
    else:
        assert got.stats.rounds == pytest.approx(len(theirs.acceptance_lengths), abs=6)


@pytest.mark.parametrize("tokens", [1, 2, 7, WINDOW - 1, WINDOW, WINDOW + 1, 5 * WINDOW + 3])
@pytest.mark.parametrize("piece", [4, 1024])
def test_prompts_of_any_length_read_whole_or_in_pieces(device, monkeypatch, tokens, piece):
    target, drafter = make_target(seed=1, device=device), make_drafter(device=device)
    prompt = make_prompt(tokens, 1, device)
    plain = greedy_generate(target, prompt, max_new_tokens=20)
    Prophet(drafter, prompt[0].tolist() + plain.token_ids, wrong=range(0, 100, 5))
    monkeypatch.setattr(decoding, "PREFILL_TOKENS", piece)
    assert greedy_generate(target, prompt, max_new_tokens=20).token_ids == plain.token_ids
    assert generate(target, drafter, prompt, max_new_tokens=20, block_size=8).token_ids == plain.token_ids


@pytest.mark.parametrize(
    "kind,changes",
    [
        ("Mistral", {"sliding_window": 9}),
        (
            "Qwen3",
            {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2},
        ),  # two layers of four slide
    ],
)
def test_targets_with_a_sliding_window(monkeypatch, kind, changes):
    """Rejected tokens must come out of a cache that has already let go of older ones."""
    target = make_target(kind, 2, **changes)
    for tokens, piece in ((2, 1024), (8, 1024), (30, 1024), (30, 4)):
        monkeypatch.setattr(decoding, "PREFILL_TOKENS", piece)
        prompt = make_prompt(tokens, 2)
        plain = greedy_generate(target, prompt, max_new_tokens=40)
        theirs = target.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=40)
        assert theirs[0, tokens:].tolist() == plain.token_ids
        known = prompt[0].tolist() + plain.token_ids
        drafter = make_drafter()
        Prophet(drafter, known, wrong=random.Random(tokens).sample(range(len(known)), 15))
        got = generate(target, drafter, prompt, max_new_tokens=40, block_size=6)
        assert got.token_ids == plain.token_ids and got.stats.rounds < 30


@pytest.mark.parametrize(
    "target_dtype,drafter_dtype",
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_dtypes_may_differ(device, target_dtype, drafter_dtype):
    target = make_target(seed=3, device=device).to(target_dtype)
    drafter = make_drafter(device=device).to(drafter_dtype)
    prompt = make_prompt(6, device=device)
    got = generate(target, drafter, prompt, max_new_tokens=30)
    assert len(got.token_ids) == 30 and sum(got.stats.acceptance_lengths) == 29
    if target_dtype == torch.float32:
        assert got.token_ids == greedy_generate(target, prompt, max_new_tokens=30).token_ids


# ---- what is committed


def test_committed_are_the_prompt_and_every_token_but_the_newest(device):
    """Each once, in order, with the hidden states of its own position."""
    target, drafter = make_target(seed=4, device=device), make_drafter(device=device)
    prompt = make_prompt(2 * WINDOW + 1, 4, device)
    plain = greedy_generate(target, prompt, max_new_tokens=30)
    known = prompt[0].tolist() + plain.token_ids
    Prophet(drafter, known, wrong=range(0, 100, 7))
    committed = []
    prefill, commit = drafter.prefill_context, drafter.commit_context

    def spy_prefill(cache, features):
        committed.append(features)
        prefill(cache, features)

    def spy_commit(cache, features, counts):
        committed.append(features[:, : int(counts)])
        commit(cache, features, counts)

    drafter.prefill_context, drafter.commit_context = spy_prefill, spy_commit
    stats = generate(target, drafter, prompt, max_new_tokens=30, block_size=5).stats
    assert stats.rounds < 20
    got = torch.cat(committed, 1).cpu()
    text = torch.tensor([known], device=device)
    with torch.no_grad():
        want = drafter.context_features(target(text, output_hidden_states=True).hidden_states).cpu()
    assert got.shape[1] in range(len(known) - 5, len(known))  # the last round has nobody to commit for
    torch.testing.assert_close(got, want[:, : got.shape[1]], rtol=1e-3, atol=1e-4)


# ---- where a text ends


def known_text(seed=5, new_tokens=40):
    target = make_target(seed=seed)
    prompt = make_prompt(6, seed)
    plain = greedy_generate(target, prompt, max_new_tokens=new_tokens)
    assert len(set(plain.token_ids)) > 10
    return target, prompt, plain.token_ids


def test_stop_tokens_anywhere_in_a_block():
    target, prompt, tokens = known_text()
    for stop in dict.fromkeys(tokens):
        end = tokens.index(stop) + 1
        drafter = make_drafter()
        Prophet(drafter, prompt[0].tolist() + tokens)
        streamed = []
        options = {"max_new_tokens": 40, "stop_token_ids": [stop]}
        plain = greedy_generate(target, prompt, **options)
        got = generate(target, drafter, prompt, block_size=8, on_tokens=streamed.append, **options)
        assert got.token_ids == plain.token_ids == sum(streamed, []) == tokens[:end]
        assert got.finish_reason == plain.finish_reason == ("stop" if end < 40 or tokens[-1] == stop else "length")
        assert sum(got.stats.acceptance_lengths) == got.stats.new_tokens - 1 == end - 1


@pytest.mark.parametrize("limit", range(1, 20))
def test_max_new_tokens_anywhere_in_a_block(limit):
    target, prompt, tokens = known_text()
    drafter = make_drafter()
    prophet = Prophet(drafter, prompt[0].tolist() + tokens, wrong=[13])
    rows = []
    handle = target.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[1]))
    got = generate(target, drafter, prompt, max_new_tokens=limit, block_size=8)
    handle.remove()
    assert got.token_ids == tokens[:limit] and got.finish_reason == "length"
    assert got.stats.acceptance_lengths == prophet.expected_lengths(6, limit, 8)
    assert all(n <= limit for n in rows[1:])
    assert greedy_generate(target, prompt, max_new_tokens=limit).token_ids == tokens[:limit]


def test_stop_tokens_are_the_targets_own_unless_given():
    target, prompt, tokens = known_text()
    drafter = make_drafter()

    def both(**options):
        plain = greedy_generate(target, prompt, max_new_tokens=40, **options)
        assert generate(target, drafter, prompt, max_new_tokens=40, **options).token_ids == plain.token_ids
        return len(plain.token_ids)

    target.generation_config.eos_token_id = tokens[9]
    assert both() == tokens.index(tokens[9]) + 1
    target.generation_config.eos_token_id = [tokens[9], tokens[4]]
    assert both() == min(tokens.index(tokens[9]), tokens.index(tokens[4])) + 1
    assert both(stop_token_ids=()) == 40
    target.generation_config.eos_token_id = None
    target.config.eos_token_id = tokens[6]
    assert both() == tokens.index(tokens[6]) + 1


# ---- statistics and cost


def test_statistics_add_up(device):
    target, drafter = make_target(device=device), make_drafter(device=device)
    prompt = make_prompt(9, device=device)
    for profile in (False, True):
        for result in (
            generate(target, drafter, prompt, max_new_tokens=25, block_size=3, profile=profile),
            greedy_generate(target, prompt, max_new_tokens=25, profile=profile),
        ):
            stats = result.stats
            assert (stats.prompt_tokens, stats.new_tokens) == (9, 25)
            assert stats.rounds == len(stats.acceptance_lengths) and sum(stats.acceptance_lengths) == 24
            assert stats.mean_acceptance_length == 24 / stats.rounds
            phases = [getattr(stats, f"{p}_seconds") for p in ("draft", "propose", "verify", "commit", "other")]
            assert stats.decode_seconds == pytest.approx(sum(phases))
            assert stats.tokens_per_second == pytest.approx(24 / stats.decode_seconds)
            assert stats.prefill_seconds > 0 and stats.verify_seconds > 0
            assert [p > 0 for p in phases] == [True] * 5 if stats.block_size == 3 else [False, False, True, False, True]
    assert generate(target, drafter, prompt, max_new_tokens=1).stats.tokens_per_second == 0.0


def test_one_read_a_round(device, monkeypatch):
    target, drafter = make_target(device=device), make_drafter(device=device)
    prompt = make_prompt(5, device=device)
    reads = []
    tolist = torch.Tensor.tolist

    def counted(tensor):
        reads.append(tuple(tensor.shape))
        with torch.utils._python_dispatch._disable_current_modes():
            return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    with NoHostRead():
        stats = generate(target, drafter, prompt, max_new_tokens=20, block_size=4).stats
    assert len(reads) == stats.rounds + 2  # and the prompt's range, and the first token


def test_the_baseline_computes_nothing_that_it_does_not_need():
    target = make_target()
    seen = []
    forward = target.forward

    def spy(*args, **kwargs):
        output = forward(*args, **kwargs)
        seen.append((output.logits.shape[1], output.hidden_states))
        return output

    spy.__signature__ = inspect.signature(forward)
    target.forward = spy
    greedy_generate(target, make_prompt(7), max_new_tokens=5)
    assert seen == [(1, None)] * 5


def test_block_size_left_out_suits_the_device(device, monkeypatch):
    drafter, target = make_drafter(device=device), make_target(device=device)
    for fast, dtype, on_cpu in (
        (False, torch.float32, 4),
        (True, torch.float32, 4),
        (False, torch.bfloat16, 3),
        (True, torch.bfloat16, 6),
    ):
        monkeypatch.setattr(decoding, "_has_fast_bfloat16", lambda fast=fast: fast)
        assert default_block_size(drafter, target.to(dtype)) == (on_cpu if device == "cpu" else 8)
    small, target = make_drafter(device=device, block_size=3), make_target(device=device)
    prompt = make_prompt(3, device=device)
    assert generate(target, small, prompt, max_new_tokens=4).stats.block_size == default_block_size(small, target) == 3


# ---- faults


def test_an_interrupt_leaves_target_and_drafter_as_they_were():
    target, prompt, tokens = known_text()
    drafter = make_drafter()
    before = {name: p.clone() for name, p in drafter.state_dict().items()}
    for stage in range(1, 6):

        def interrupt(_, calls=[]):  # noqa: B006
            calls.append(1)
            if len(calls) == stage:  # noqa: B023
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            generate(target, drafter, prompt, max_new_tokens=40, on_tokens=lambda t, f=interrupt: f(t))
        interrupt.__defaults__[0].clear()
        assert generate(target, drafter, prompt, max_new_tokens=40).token_ids == tokens
    commit = drafter.commit_context

    def failing(cache, features, counts):
        commit(cache, features, counts)
        raise RuntimeError("out of memory")

    drafter.commit_context = failing
    with pytest.raises(RuntimeError, match="out of memory"):
        generate(target, drafter, prompt, max_new_tokens=40)
    drafter.commit_context = commit
    assert generate(target, drafter, prompt, max_new_tokens=40).token_ids == tokens
    assert all(torch.equal(p, before[name]) for name, p in drafter.state_dict().items())


@pytest.mark.parametrize("change,message", [
    ({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, r"input_ids: expected a prompt .* got an empty prompt"),
    ({"input_ids": torch.zeros(2, 3, dtype=torch.int64)}, r"input_ids: expected one prompt, \[1, N\].*got \[2, 3\]"),
    ({"input_ids": torch.zeros(3, dtype=torch.int64)}, r"input_ids: expected one prompt, \[1, N\].*got \[3\]"),
    ({"input_ids": torch.zeros(1, 3)}, r"input_ids: expected an int64 or int32 tensor .* got torch.float32"),
    ({"input_ids": [1, 2, 3]}, r"input_ids(\[0\])?: expected an int64 or int32 tensor .* got (int|list)"),
    ({"input_ids": torch.tensor([[0, 97]])}, r"input_ids: expected token ids in 0..96, got ids from 0 to 97"),
    ({"input_ids": torch.tensor([[-1, 5]])}, r"input_ids: expected token ids in 0..96, got ids from -1 to 5"),
    ({"max_new_tokens": 0}, r"max_new_tokens: expected a whole number of at least 1, below .*, got 0"),
    ({"max_new_tokens": 2**31}, r"max_new_tokens: expected .* got 2147483648"),
    ({"max_new_tokens": -3}, r"max_new_tokens: expected .* got -3"),
    ({"max_new_tokens": 2.5}, r"max_new_tokens: expected .* got 2.5"),
    ({"stop_token_ids": 5}, r"stop_token_ids: expected token ids, .* got 5"),
    ({"stop_token_ids": "</s>"}, r"stop_token_ids: expected token ids, .* got '</s>'"),
    ({"stop_token_ids": [None]}, r"stop_token_ids: expected token ids, .* got \[None\]"),
    ({"stop_token_ids": [10**12]}, r"stop_token_ids: expected token ids, .* got \[1000000000000\]"),
])  # fmt: skip
def test_bad_requests(change, message):
    target, drafter = make_target(), make_drafter()
    arguments = {"input_ids": make_prompt(3), "max_new_tokens": 5} | change
    with pytest.raises(ValueError, match=message):
        generate(target, drafter, **arguments)
    with pytest.raises(ValueError, match=message):
        greedy_generate(target, **arguments)


def test_what_is_no_sampling():
    with pytest.raises(ValueError, match="sampling: expected a Sampling, or None for greedy, got dict"):
        generate(make_target(), make_drafter(), make_prompt(3), max_new_tokens=5, sampling={"temperature": 1.0})


def test_numbers_may_be_numpy():
    target, drafter, prompt = make_target(), make_drafter(), make_prompt(3)
    want = generate(target, drafter, prompt, max_new_tokens=9, block_size=3)
    got = generate(target, drafter, prompt, max_new_tokens=np.int64(9), block_size=np.int64(3), stop_token_ids=np.array([200]))
    assert got.token_ids == want.token_ids and got.stats.block_size == 3


@pytest.mark.parametrize("block_size", [1, 0, -2, 9, 4.0, True])
def test_bad_block_sizes(block_size):
    with pytest.raises(ValueError, match=rf"block_size: expected a whole number in 2\.\.8.*got {block_size}"):
        generate(make_target(), make_drafter(), make_prompt(3), max_new_tokens=5, block_size=block_size)


def test_targets_and_drafters_that_do_not_fit():
    prompt = make_prompt(3)

    def refused(target, drafter, message, prompt=prompt):
        with pytest.raises(ValueError, match=message):
            generate(target, drafter, prompt, max_new_tokens=5)

    drafter = make_drafter()
    refused(make_target(hidden_size=64), drafter, r"drafter: expected the target's hidden size, 64, got 48")
    refused(make_target(vocabulary=98), drafter, r"drafter: expected the target's vocabulary, 98 tokens, got 97")
    refused(
        make_target(num_hidden_layers=2),
        drafter,
        r"drafter: expected taps on the target's layers, 0..1, got .*\[0, 2\]",
    )
    refused(make_target().train(), drafter, r"target: expected a model in eval mode")
    refused(make_target(), None, "drafter: expected a DFlashDraftModel or DFlash2DraftModel, got NoneType")
    headless = make_target()
    headless.lm_head = None
    refused(headless, drafter, r"target: expected a model with an output head, got LlamaForCausalLM")


def test_devices_that_do_not_fit():
    target, drafter, prompt = make_target(device="mps"), make_drafter(), make_prompt(3)
    with pytest.raises(ValueError, match=r"input_ids: expected a tensor on the target's device, mps:0, got cpu"):
        generate(target, drafter, prompt, max_new_tokens=5)
    with pytest.raises(ValueError, match=r"drafter: expected a model on the target's device, mps:0, got cpu"):
        generate(target, drafter, prompt.to("mps"), max_new_tokens=5)
    with pytest.raises(ValueError, match=r"drafter: expected a model on the target's device, cpu, got mps:0"):
        generate(make_target(), drafter.to("mps"), prompt, max_new_tokens=5)


# ---- torch.compile


@pytest.mark.parametrize("kind", [{}, DFLASH_1], ids=["DFlash 2", "DFlash 1"])
def test_compiled_is_the_same_and_compiles_no_more_after_two_rounds(device, monkeypatch, kind):
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    target, drafter = make_target(seed=1, device=device), make_drafter(device=device, **kind)
    prompt = make_prompt(WINDOW + 2, 1, device)
    want = greedy_generate(target, prompt, max_new_tokens=30)
    frames = []

    def count(tokens):
        frames.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    for _ in range(2):
        got = generate(target, drafter, prompt, max_new_tokens=30, block_size=4, compile=True, on_tokens=count)
        assert got.token_ids == want.token_ids
    assert frames[0] < frames[2] and set(frames[2:]) == {frames[2]}  # the second call finds it all compiled
    sampled = generate(target, drafter, prompt, max_new_tokens=9, compile=True, sampling=Sampling(temperature=1e-4))
    assert sampled.token_ids == want.token_ids[:9]


def test_one_process_compiles_every_block_size(monkeypatch):
    """More graphs of one function than torch.compile allows by itself."""
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    target, drafter, prompt = make_target(seed=1), make_drafter(block_size=16, window=19), make_prompt(5)
    want = greedy_generate(target, prompt, max_new_tokens=4).token_ids
    for block_size in range(2, 17):
        assert generate(target, drafter, prompt, max_new_tokens=4, block_size=block_size, compile=True).token_ids == want
