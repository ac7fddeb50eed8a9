"""Rejection sampling against the distribution that it must not change, and against transformers' own warpers."""

import math

import pytest
import torch
import transformers
from test_decoding import make_drafter, make_prompt, make_target
from test_drafter import DFLASH_1, one_thread  # noqa: F401

from torch_dflash2 import Sampling, Session, generate
from torch_dflash2.sampling import Drafts, verify

SAMPLES = 50_000


def chi_square_fits(counts, probabilities):
    """Whether counts are a draw from probabilities, but for one such draw in a million (Wilson and Hilferty, 1931)."""
    expected = probabilities.double() * counts.sum()
    assert not counts[expected == 0].any(), "a token that cannot come"
    rare = expected < 5  # the approximation is not for these one by one
    seen = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    if expected[-1] < 5:
        seen, expected = seen[:-1], expected[:-1]
    freedom = len(expected) - 1
    if freedom < 1:
        return True
    statistic = ((seen - expected) ** 2 / expected).sum().item()
    spread = math.sqrt(2 / (9 * freedom))
    return ((statistic / freedom) ** (1 / 3) - (1 - spread * spread)) / spread < 4.75


def test_the_chi_square_test_notices():
    generator = torch.Generator().manual_seed(0)
    fair = torch.full((8,), 1 / 8)
    biased = fair + torch.tensor([0.01, -0.01] + [0.0] * 6)
    counts = torch.multinomial(fair, SAMPLES, replacement=True, generator=generator).bincount(minlength=8)
    assert chi_square_fits(counts, fair) and not chi_square_fits(counts, biased)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 3},
        {"top_p": 0.7},
        {"temperature": 1.3, "top_p": 0.5, "top_k": 5},
    ],
)
def test_probabilities_are_those_of_transformers(device, options):
    logits = 2 * torch.randn(3, 5, 23, generator=torch.Generator().manual_seed(1))
    got = Sampling(**options).probabilities(logits.to(device)).cpu()
    scores = logits.flatten(0, 1) / options.get("temperature", 1.0)
    if "top_k" in options:
        scores = transformers.TopKLogitsWarper(options["top_k"])(None, scores)
    if "top_p" in options:
        scores = transformers.TopPLogitsWarper(options["top_p"])(None, scores)
    torch.testing.assert_close(got, scores.softmax(-1).view_as(got))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 4}, {"top_p": 0.8}])
@pytest.mark.parametrize("drafter", ["perfect", "good", "useless", "hopeless", "few candidates"])
def test_verified_tokens_have_the_targets_distribution(options, drafter):
    """For two drafts in a row: the first token, the second after each first, the third after each pair."""
    vocabulary, generator = 6, torch.Generator().manual_seed(2)
    sampling = Sampling(**options, generator=generator)
    # The target's logits depend on what came before, as in a text.
    table = 1.5 * torch.randn(vocabulary + 1, vocabulary + 1, vocabulary, generator=torch.Generator().manual_seed(3))
    if drafter == "hopeless":  # the target never takes what it drafts
        table[..., 0] = -torch.inf
    none = vocabulary

    def target_probabilities(*before):
        return sampling.probabilities(table[tuple([none] * (2 - len(before)) + list(before))])

    def draft_distribution(row, first):
        """[samples, K] and the candidates, for a row whose predecessor is `first`."""
        if drafter == "hopeless":
            return torch.eye(vocabulary)[0].expand(SAMPLES, -1), None
        if drafter == "useless":
            return torch.full((SAMPLES, vocabulary), 1 / vocabulary), None
        logits = table[none, none].expand(SAMPLES, -1) if row == 0 else table[none, first]
        if drafter == "perfect":
            return sampling.probabilities(logits), None
        noisy = logits + 0.5 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(row))
        if drafter == "good":
            return sampling.probabilities(noisy), None
        scores, candidates = noisy.topk(2)
        return scores.softmax(-1), candidates

    rows, chosen = [], None
    for row in range(2):
        q, candidates = draft_distribution(row, chosen)
        index = sampling.draw(q)
        chosen = index if candidates is None else candidates.gather(1, index[:, None]).squeeze(1)
        rows.append((chosen, q, candidates))
    ids, q, candidates = zip(*rows, strict=True)
    drafts = Drafts(torch.stack(ids, 1), torch.stack(q, 1), None if candidates[0] is None else torch.stack(candidates, 1))
    logits = torch.stack([table[none, none].expand(SAMPLES, -1), table[none, ids[0]], table[ids[0], ids[1]]], 1)
    kept, following = verify(sampling, drafts, logits)
    if drafter == "perfect":
        assert (kept == 2).all()
    if drafter == "hopeless":
        assert (kept == 0).all()
    tokens = torch.cat([drafts.token_ids, following[:, None]], 1).scatter(1, kept[:, None], following[:, None])

    assert chi_square_fits(tokens[:, 0].bincount(minlength=vocabulary), target_probabilities())
    for first in range(vocabulary):
        second = tokens[(kept >= 1) & (tokens[:, 0] == first), 1]
        assert chi_square_fits(second.bincount(minlength=vocabulary), target_probabilities(first)), first
        for then in range(vocabulary):
            third = tokens[(kept == 2) & (tokens[:, 0] == first) & (tokens[:, 1] == then), 2]
            assert chi_square_fits(third.bincount(minlength=vocabulary), target_probabilities(first, then)), (first, then)


@pytest.mark.parametrize("changes", [{"selector_top_k": 3}, DFLASH_1], ids=["DFlash 2", "DFlash 1"])
def test_texts_have_the_targets_distribution(changes):
    """Whole decodes: 4 tokens after a prompt, each prompt many times over, in lanes that share a round."""
    vocabulary = 5
    target = make_target(seed=1, vocabulary=vocabulary, num_hidden_layers=3)
    target.lm_head.weight.mul_(0.2)  # so that every token has a chance
    drafter = make_drafter(vocabulary=vocabulary, **changes)
    prompt = make_prompt(3, vocabulary=vocabulary)
    sampling = Sampling(temperature=0.9, generator=torch.Generator().manual_seed(4))
    prompts = [prompt] * 600
    results = generate(target, drafter, prompts, max_new_tokens=4, stop_token_ids=(), block_size=4, sampling=sampling)
    texts = torch.tensor([result.token_ids for result in results])
    assert 1.2 < sum(r.stats.mean_acceptance_length for r in results) / len(results) < 3.0
    # The chance of each pair of tokens 3 and 4, over all that may come before.
    firsts = torch.cartesian_prod(*[torch.arange(vocabulary)] * 4)
    with torch.no_grad():
        logits = target(torch.cat([prompt.expand(len(firsts), -1), firsts], 1)).logits[:, 2:-1]
    chances = (logits / 0.9).softmax(-1).gather(2, firsts[..., None]).squeeze(2).prod(1).view([vocabulary] * 4)
    for keep in ((0, 1), (1, 2), (2, 3), (0, 3)):
        counts = (texts[:, keep[0]] * vocabulary + texts[:, keep[1]]).bincount(minlength=vocabulary**2)
        marginal = chances.sum([axis for axis in range(4) if axis not in keep]).flatten()
        assert chi_square_fits(counts, marginal), keep


def test_a_generator_makes_it_repeat(device):
    target, drafter = make_target(device=device), make_drafter(device=device)
    prompts = [make_prompt(n, n, device) for n in (3, 7)]

    def run(seed):
        sampling = Sampling(temperature=1.2, top_p=0.9, generator=torch.Generator(device).manual_seed(seed))
        batch = generate(target, drafter, prompts, max_new_tokens=12, sampling=sampling)
        one = Session(target, drafter, sampling=sampling).generate(prompts[0], max_new_tokens=12)
        return [result.token_ids for result in (*batch, one)]

    assert run(1) == run(1) != run(2)


def test_a_low_temperature_is_greedy(device):
    target, drafter = make_target(device=device), make_drafter(device=device)
    prompt = make_prompt(5, device=device)
    greedy = generate(target, drafter, prompt, max_new_tokens=20)
    cold = generate(target, drafter, prompt, max_new_tokens=20, sampling=Sampling(temperature=1e-4))
    one = generate(target, drafter, prompt, max_new_tokens=20, sampling=Sampling(temperature=5.0, top_k=1))
    assert cold.token_ids == one.token_ids == greedy.token_ids


@pytest.mark.parametrize("options,message", [
    ({"temperature": 0.0}, "temperature: expected a number in 1e-6..1e6, got 0.0"),
    ({"temperature": -1.0}, "temperature: expected a number in 1e-6..1e6, got -1.0"),
    ({"temperature": float("nan")}, "temperature: expected a number in 1e-6..1e6, got nan"),
    ({"top_p": 0.0}, r"top_p: expected a number in \(0, 1\], got 0.0"),
    ({"top_p": 1.1}, r"top_p: expected a number in \(0, 1\], got 1.1"),
    ({"top_k": -1}, "top_k: expected a whole number of at least 0, got -1"),
    ({"top_k": 2.5}, "top_k: expected a whole number of at least 0, got 2.5"),
    ({"temperature": "hot"}, "temperature: expected a number in 1e-6..1e6, got hot"),
    ({"temperature": 1e-30}, "temperature: expected a number in 1e-6..1e6, got 1e-30"),
    ({"top_p": True}, r"top_p: expected a number in \(0, 1\], got True"),
    ({"top_k": None}, "top_k: expected a whole number of at least 0, got None"),
])  # fmt: skip
def test_bad_sampling(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)
