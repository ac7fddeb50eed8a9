"""What targets can be decoded, and how those that cannot are refused."""

import pytest
import torch
import transformers
from test_decoding import HIDDEN, VOCABULARY, Prophet, make_drafter, make_prompt, make_target
from test_drafter import one_thread  # noqa: F401

from torch_dflash2 import Sampling, Session, generate, greedy_generate

LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}


def recurrent_target(kind, seed=0):
    name, changes = {
        "qwen3_next": ("Qwen3Next", LINEAR | EXPERTS),
        "qwen3_5": ("Qwen3_5", LINEAR),
        "qwen3_5_moe": ("Qwen3_5Moe", LINEAR | EXPERTS),
    }[kind]
    config = getattr(transformers, f"{name}TextConfig" if kind != "qwen3_next" else f"{name}Config")(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.3,
        pad_token_id=None,
        **changes,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("seed", range(3))
def test_a_recurrent_state_forgets_rejected_drafts(kind, seed):
    """Drafts right and wrong by turns, with weights so sharp that a state which had read a wrong one would show."""
    target, drafter, prompt = recurrent_target(kind, seed), make_drafter(), make_prompt(5 + seed, seed)
    want = greedy_generate(target, prompt, max_new_tokens=40, stop_token_ids=()).token_ids
    assert len(set(want)) > 8
    wrong = [position for position in range(100) if position % 7 == 3 or position % 11 == 5]
    prophet = Prophet(drafter, prompt[0].tolist() + want, wrong)
    got = generate(target, drafter, prompt, max_new_tokens=40, block_size=6, stop_token_ids=())
    assert got.token_ids == want
    assert got.stats.acceptance_lengths == prophet.expected_lengths(prompt.shape[1], 40, 6)


@pytest.mark.parametrize("kind", ["DeepseekV32", "GlmMoeDsa"])
def test_sparse_attention(kind):
    heads = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    experts = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    index = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 16, "v_head_dim": 8, "head_dim": 8}
    options = heads | experts | index | {"first_k_dense_replace": 1}
    target, prompt, drafter = make_target(kind, attn_implementation="eager", **options), make_prompt(5), make_drafter()
    want = greedy_generate(target, prompt, max_new_tokens=40).token_ids
    prophet = Prophet(drafter, prompt[0].tolist() + want, wrong=range(7, 60, 5))
    got = generate(target, drafter, prompt, max_new_tokens=40, block_size=6)
    assert got.token_ids == want and got.stats.acceptance_lengths == prophet.expected_lengths(5, 40, 6)
    with pytest.raises(ValueError, match="target: expected attn_implementation eager, as sparse attention"):
        generate(make_target(kind, **options), drafter, prompt, max_new_tokens=3)


def test_a_session_with_a_recurrent_target_goes_on_but_not_back():
    target, prompt = recurrent_target("qwen3_5"), make_prompt(5)
    session = Session(target, make_drafter(), stop_token_ids=())
    for turn in (prompt, make_prompt(3, 1)):
        text = [*session.token_ids, *turn[0].tolist()]
        want = greedy_generate(target, torch.tensor([text]), max_new_tokens=12, stop_token_ids=()).token_ids
        assert session.generate(turn, max_new_tokens=12).token_ids == want
    for change in (lambda: session.rewind(3), session.fork):
        with pytest.raises(
            ValueError, match=r"target: expected full and sliding attention only to (go back in|fork) a text, got"
        ):
            change()


def tiny(name, **changes):
    config = getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=3, **changes)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)


@pytest.mark.parametrize(
    "make,prompts,message",
    [
        (lambda: recurrent_target("qwen3_next"), 2, "full and sliding attention only .* got full_attention, linear_attention"),
        (lambda: make_target(attn_implementation="flex_attention"), 2, "attn_implementation sdpa or eager .* flex_attention"),
        (lambda: tiny("Mamba", state_size=4), 1, "a model that takes past_key_values, got MambaForCausalLM"),
        (
            lambda: tiny("RecurrentGemma", num_attention_heads=2, intermediate_size=64, lru_width=HIDDEN),
            1,
            "no recurrent state, or a model of qwen3_next, .* got recurrent_gemma",
        ),
        (
            lambda: tiny("GPTNeo", num_layers=3, num_heads=2, attention_types=[[["global", "local", "global"], 1]]),
            2,
            "a model that takes position_ids and masks as given to decode several prompts at once, got GPTNeoForCausalLM",
        ),
        (
            lambda: tiny("Falcon", num_attention_heads=2, alibi=True),
            2,
            "a model that takes position_ids and masks .* got FalconFor",
        ),
    ],
    ids=["linear attention, two prompts", "flex attention, two prompts", "Mamba", "RecurrentGemma", "GPT-Neo", "ALiBi"],
)
def test_targets_that_are_refused(make, prompts, message):
    drafter = make_drafter()
    with pytest.raises(ValueError, match=f"target: expected {message}"):
        generate(make(), drafter, [make_prompt(3, n) for n in range(prompts)], max_new_tokens=3)


@pytest.mark.parametrize("no_target", [None, "path", torch.nn.Linear(2, 2)])
def test_what_is_no_target(no_target):
    for call in (
        lambda: generate(no_target, make_drafter(), make_prompt(3), max_new_tokens=3),
        lambda: greedy_generate(no_target, make_prompt(3), max_new_tokens=3),
        lambda: Session(no_target, make_drafter()),
    ):
        with pytest.raises(ValueError, match=f"target: expected a Hugging Face causal LM, got {type(no_target).__name__}"):
            call()


def test_a_padded_output_head():
    """Rows of the head beyond the vocabulary are no tokens, however large their logits."""
    target = make_target(seed=1)
    prompts = [make_prompt(5, n) for n in range(2)]
    want = [greedy_generate(target, prompt, max_new_tokens=20).token_ids for prompt in prompts]
    padded = torch.nn.Linear(HIDDEN, VOCABULARY + 31, bias=False)
    padded.weight.data = torch.cat([target.lm_head.weight, 50 * target.lm_head.weight[:31]])
    target.lm_head = padded
    assert greedy_generate(target, prompts[0], max_new_tokens=20).token_ids == want[0]
    for sampling in (None, Sampling(1e-4, generator=torch.Generator().manual_seed(0))):
        got = generate(target, make_drafter(), prompts, max_new_tokens=20, sampling=sampling)
        assert [result.token_ids for result in got] == want
