"""Prompts decoded together: each must come out as if it were alone, whatever the others do."""

import functools
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_decoding import VOCABULARY, make_drafter, make_prompt, make_target
from test_drafter import one_thread  # noqa: F401

import torch_dflash2
from torch_dflash2 import generate, greedy_generate
from torch_dflash2.target import TargetLanes


class Prophets:
    """A drafter's propose that knows each text, found by its position and anchor, and is wrong where chance says so."""

    def __init__(self, drafter, texts, wrong, seed=0):
        self.drafter, self.texts, self.wrong, self.chance = drafter, texts, wrong, random.Random(seed)
        self.inner_forward = drafter.forward
        drafter.forward, drafter.propose = self.forward, self.propose

    def forward(self, embeddings, cache):
        self.positions = cache.token_counts.cpu().tolist()
        return self.inner_forward(embeddings, cache)

    def propose(self, hidden, anchor_ids, head):
        drafts = []
        for position, anchor in zip(self.positions, anchor_ids.cpu().tolist(), strict=True):
            known = [text for text in self.texts if position < len(text) and text[position] == anchor]
            text = (self.chance.choice(known) if known else []) + [0] * 40
            row = text[position + 1 : position + 1 + hidden.shape[1]]
            drafts.append([self.chance.randrange(VOCABULARY) if self.chance.random() < self.wrong else token for token in row])
        return torch.tensor(drafts, device=hidden.device)


@functools.cache
def target_of(kind, seed, device):
    kinds = {
        "llama": ("Llama", {}),
        "qwen": ("Qwen3", {}),
        "sliding": ("Mistral", {"sliding_window": 7}),
        "mixed": ("Qwen3", {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1}),
    }
    name, changes = kinds[kind]
    return make_target(name, seed, device, **changes)


@functools.cache
def plain(kind, seed, device, prompt, tokens, stops):
    ids = torch.tensor([prompt], device=device)
    result = greedy_generate(target_of(kind, seed, device), ids, max_new_tokens=tokens, stop_token_ids=stops)
    return result.token_ids, result.finish_reason


# Lengths and limits are skewed to short texts, so that lanes end at all times and many fit in a run.
PROMPTS = st.lists(st.tuples(st.integers(1, 25), st.integers(0, 9)), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from(["llama", "qwen", "sliding", "mixed"]),
    seed=st.integers(0, 2),
    prompts=PROMPTS,
    window=st.integers(9, 14),
    block=st.integers(2, 8),
    tokens=st.integers(1, 14),
    wrong=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    stops=st.sampled_from([(), (3, 11, 40, 77, 90, 12, 64)]),
)
def test_every_text_is_that_of_plain_greedy(device, kind, seed, prompts, window, block, tokens, wrong, stops):
    ids = [make_prompt(length, 100 * seed + number) for length, number in prompts]
    want = [plain(kind, seed, device, tuple(prompt[0].tolist()), tokens, stops) for prompt in ids]
    drafter = make_drafter(device=device, window=window)
    Prophets(drafter, [prompt[0].tolist() + text for prompt, (text, _) in zip(ids, want, strict=True)], wrong)
    results = generate(
        target_of(kind, seed, device),
        drafter,
        [prompt.to(device) for prompt in ids],
        max_new_tokens=tokens,
        stop_token_ids=stops,
        block_size=block,
    )
    assert [(result.token_ids, result.finish_reason) for result in results] == want
    if wrong == 0.0 and len(prompts) == 1:
        assert results[0].stats.rounds == -(-(len(want[0][0]) - 1) // block)


def test_lanes_take_the_next_prompt_while_the_others_go_on(device):
    """Seven prompts, four lanes: as soon as a text ends, its lane begins the next."""
    target, drafter = make_target(device=device), make_drafter(device=device)
    prompts = [make_prompt(3 + n, n, device) for n in range(7)]
    texts = [greedy_generate(target, p, max_new_tokens=40).token_ids for p in prompts]
    ends = [40, 3, 9, 25, 12, 1, 30]
    stops = sorted({text[end - 1] for text, end in zip(texts, ends, strict=True) if end < 40})
    want = [greedy_generate(target, p, max_new_tokens=40, stop_token_ids=stops).token_ids for p in prompts]
    Prophets(drafter, [p[0].tolist() + text for p, text in zip(prompts, want, strict=True)], wrong=0.3)
    events = []
    results = generate(
        target,
        drafter,
        prompts,
        max_new_tokens=40,
        stop_token_ids=stops,
        block_size=5,
        on_tokens=lambda tokens, number: events.append((number, tokens)),
    )
    assert [result.token_ids for result in results] == want
    for number in range(7):
        assert sum((tokens for n, tokens in events if n == number), []) == want[number]
    order = [number for number, _ in events]
    last = {number: len(order) - 1 - order[::-1].index(number) for number in range(7)}
    began = {number: order.index(number) for number in range(7)}
    for number in range(4, 7):  # some of the earlier ones had ended, and others had not
        assert 1 <= sum(last[other] > began[number] for other in range(number)) <= 3
    rounds = [result.stats.acceptance_lengths for result in results]
    assert all(sum(lengths) == len(text) - 1 for lengths, text in zip(rounds, want, strict=True))


def test_a_lane_that_has_ended_commits_nothing(device, monkeypatch):
    target, drafter = make_target(device=device), make_drafter(device=device)
    prompts = [make_prompt(4, n, device) for n in range(2)]
    first, second = (greedy_generate(target, p, max_new_tokens=20).token_ids for p in prompts)
    stop = next(token for token in second[:4] if token not in first)
    commits = []
    inner = drafter.commit_context
    drafter.commit_context = lambda cache, features, counts: (commits.append(counts.tolist()), inner(cache, features, counts))
    results = generate(target, drafter, prompts, max_new_tokens=20, stop_token_ids=[stop], block_size=3)
    assert results[1].finish_reason == "stop" and len(results[0].token_ids) == 20
    ended = results[1].stats.rounds
    assert all(counts[1] > 0 for counts in commits[:ended]) and all(counts[1] == 0 for counts in commits[ended:])
    assert len(commits) > ended


def test_one_read_a_round_for_all_lanes(device, monkeypatch):
    target, drafter = make_target(device=device), make_drafter(device=device)
    prompts = [make_prompt(5 + n, n, device) for n in range(3)]
    reads = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: (reads.append(tuple(tensor.shape)), tolist(tensor))[1])
    results = generate(target, drafter, prompts, max_new_tokens=20, block_size=4, stop_token_ids=())
    rounds = max(result.stats.rounds for result in results)
    assert len(reads) == rounds + 2 * len(prompts)  # and of each prompt its range and its first token


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_implementations(attention):
    target, drafter = make_target(attn_implementation=attention), make_drafter()
    prompts = [make_prompt(3 + 4 * n, n) for n in range(3)]
    want = [greedy_generate(target, prompt, max_new_tokens=15).token_ids for prompt in prompts]
    assert [result.token_ids for result in generate(target, drafter, prompts, max_new_tokens=15)] == want


def test_lists_of_prompts_are_checked_one_by_one():
    target, drafter = make_target(), make_drafter()
    for prompts, message in (
        ([], "input_ids: expected at least one prompt, got an empty list"),
        ([make_prompt(3), make_prompt(3)[0]], r"input_ids\[1\]: expected one prompt, \[1, N\]"),
        ([make_prompt(3), torch.tensor([[97]])], r"input_ids\[1\]: expected token ids in 0..96"),
        ([1, 2, 3], r"input_ids\[0\]: expected an int64 or int32 tensor \[1, N\], got int"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(target, drafter, prompts, max_new_tokens=5)


def test_buffers_grow_and_keep_what_they_hold(monkeypatch):
    monkeypatch.setattr(torch_dflash2.target, "GROWTH", 4)
    target, drafter = make_target(), make_drafter()
    prompts = [make_prompt(n, n) for n in (2, 30, 7)]
    want = [greedy_generate(target, prompt, max_new_tokens=25).token_ids for prompt in prompts]
    assert [result.token_ids for result in generate(target, drafter, prompts, max_new_tokens=25)] == want


def test_reading_beyond_what_is_kept_is_forgotten(device):
    """Tokens that were read and not kept, even by the longest lane, must not be seen by anyone."""
    target = make_target(device=device)
    lanes = TargetLanes(target, 2)
    texts = [make_prompt(12, n, device) for n in range(2)]
    for lane, text in enumerate(texts):
        lanes.read(text[:, : 3 + lane], lane=lane)
        lanes.keep([3 + lane if lane == other else 0 for other in range(2)])
    with torch.no_grad():
        want = torch.cat([target(text[:, : 8 + lane]).logits[:, -5:] for lane, text in enumerate(texts)])
    for rubbish in (make_prompt(7, 9, device), make_prompt(3, 8, device)):
        lanes.read(rubbish.expand(2, -1), lengths=torch.tensor(lanes.lengths, dtype=torch.int32, device=device))
        block = torch.cat([text[:, 3 + lane : 8 + lane] for lane, text in enumerate(texts)])
        got = lanes.read(block, lengths=torch.tensor(lanes.lengths, dtype=torch.int32, device=device)).logits
        torch.testing.assert_close(got.cpu(), want.cpu(), rtol=1e-4, atol=1e-4)
