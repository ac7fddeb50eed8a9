"""Greedy, lossless speculative decoding of a Hugging Face causal LM, the target, with a DFlash 2 drafter.

A round: the drafter fills a block: the anchor, which is the newest token of the text, and the tokens drafted to follow it.
One forward of the target scores every row of the block. Drafts are accepted up to the first that is not the target's own
choice; that choice, which the same forward gave, follows them and is the next anchor. So the target decides every token,
and the drafter decides only how many come at a time.

`greedy_generate` is the same without a drafter, one token a forward: the oracle and the baseline.
"""

import inspect
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor

from .drafter import DFlash2DraftModel

# A longer prompt is read in pieces of this many tokens, since all layers' hidden states of a piece are alive at once.
PREFILL_TOKENS = 1024

Target = Any  # a transformers.PreTrainedModel with an output head


@dataclass
class GenerationStats:
    """What one call did, in tokens, rounds and seconds of wall-clock time.

    `prefill` is the target reading the prompt. All else is decoding, in phases that add up to `decode_seconds`: `draft`
    (the drafter's layers), `propose` (output head and choice of drafts), `verify` (the target's forward and its choices),
    `commit` (context into the drafter's rings, the prompt's included) and `other` (the rest, `on_tokens` included). On
    devices that work behind the host's back the time shows where the host waits, in `verify`, unless the call was made
    with `profile=True`.
    """

    prompt_tokens: int
    block_size: int  # rows a forward verifies, the anchor included; 1: plain greedy
    new_tokens: int = 0
    acceptance_lengths: list[int] = field(default_factory=list)  # tokens that each round added: 1 to block_size
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    propose_seconds: float = 0.0
    verify_seconds: float = 0.0
    commit_seconds: float = 0.0
    other_seconds: float = 0.0

    @property
    def rounds(self) -> int:
        """Forwards of the target after the prompt."""
        return len(self.acceptance_lengths)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a round; the first token of all comes from the prompt and counts for none. 0 without rounds."""
        return sum(self.acceptance_lengths) / self.rounds if self.rounds else 0.0

    @property
    def decode_seconds(self) -> float:
        return self.draft_seconds + self.propose_seconds + self.verify_seconds + self.commit_seconds + self.other_seconds

    @property
    def tokens_per_second(self) -> float:
        """Of decoding: without the prompt and the first token, which it gives. 0 without rounds."""
        return (self.new_tokens - 1) / self.decode_seconds if self.rounds else 0.0


@dataclass
class GenerationResult:
    """token_ids: the new tokens, the stop token included if one was chosen. finish_reason: why there are no more."""

    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    stats: GenerationStats


@torch.inference_mode()
def generate(
    target: Target,
    drafter: DFlash2DraftModel,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    stop_token_ids: Iterable[int] | None = None,
    block_size: int | None = None,
    on_tokens: Callable[[list[int]], Any] | None = None,
    profile: bool = False,
) -> GenerationResult:
    """Continues one prompt with the target's own greedy choices, several a forward where the drafter foresaw them.

    target: a Hugging Face causal LM in eval mode.
    drafter: made for this target, on the same device; its dtype may differ.
    input_ids: the prompt, int64 or int32 [1, N], N >= 1, on the same device.
    max_new_tokens: at least 1.
    stop_token_ids: each ends the text and is part of it; the target's own if left out, () for none.
    block_size: rows that the target verifies a round, 2 up to the drafter's; `default_block_size` if left out.
    on_tokens: called with each list of token ids as soon as they are certain.
    profile: waits for the device after each phase, for true seconds a phase on any device; slower where that matters.

    The tokens are those of `greedy_generate`, as far as the target's choices do not depend on how many rows it scores at
    once: in float32 a difference takes two tokens whose logits agree to rounding; in bfloat16 it is common.
    Raises ValueError, naming the argument, for what cannot be decoded. All state is the call's own: after an error or an
    interrupt, target and drafter are as before.
    """
    device = _check_request(target, input_ids, max_new_tokens)
    _check_pair(target, drafter, device)
    if block_size is None:
        block_size = default_block_size(drafter, target)
    block_size = _check_block_size(drafter, block_size)
    text = _Text(target, max_new_tokens, stop_token_ids, on_tokens)
    stats = GenerationStats(prompt_tokens=input_ids.shape[1], block_size=block_size)
    watch = _Stopwatch(stats, device if profile else None)
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()

    draft_cache = drafter.make_cache()
    target_cache = _make_cache(target)
    target_cache.activate_past_recording()  # without it a sliding window could not give back rejected tokens
    for piece in input_ids.split(PREFILL_TOKENS, dim=1):
        scored = target(piece, past_key_values=target_cache, use_cache=True, output_hidden_states=True, **_last_logits(target))
        target_cache.crop(0)  # nothing to give back: a sliding window lets go of what it no longer needs
        watch.lap("prefill")
        drafter.prefill_context(draft_cache, drafter.context_features(scored.hidden_states))
        watch.lap("commit")
    anchor = scored.logits[:, -1:].argmax(-1)  # [1, 1]
    text.add(anchor[0].tolist())
    watch.lap("prefill")

    while not text.finish_reason:
        rows = min(block_size, text.remaining)  # no round can use more
        block = anchor
        if rows > 1:
            hidden = drafter(drafter.embed_block(embedding, anchor[0], block_size), draft_cache)
            watch.lap("draft")
            block = torch.cat([anchor, drafter.propose(hidden[:, 1:rows], anchor[0], head)], dim=1)
            watch.lap("propose")

        scored = target(block, past_key_values=target_cache, use_cache=True, output_hidden_states=rows > 1)
        choices = scored.logits.argmax(-1)  # [1, rows]: what the target puts after each row
        counts = 1 + (block[:, 1:] == choices[:, :-1]).int().cumprod(1).sum(1, dtype=torch.int32)  # [1]
        watch.lap("verify")
        if rows > 1:  # one row: the text ends here
            # The anchor and the accepted drafts are certain and read by the target. The next anchor is not read yet.
            drafter.commit_context(draft_cache, drafter.context_features(scored.hidden_states), counts)
            watch.lap("commit")
        # The round's one read. Accepted drafts equal the choices before them, so these are all the new tokens.
        count, *tokens = torch.cat([counts, choices[0]]).tolist()
        watch.lap("verify")

        stats.acceptance_lengths.append(text.add(tokens[:count]))
        target_cache.crop(count - rows)
        anchor = choices[:, count - 1 : count]
        watch.lap("other")
    return text.result(stats)


@torch.inference_mode()
def greedy_generate(
    target: Target,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    stop_token_ids: Iterable[int] | None = None,
    on_tokens: Callable[[list[int]], Any] | None = None,
    profile: bool = False,
) -> GenerationResult:
    """Continues one prompt with the target's greedy choices, one a forward. Arguments and errors are those of `generate`."""
    device = _check_request(target, input_ids, max_new_tokens)
    text = _Text(target, max_new_tokens, stop_token_ids, on_tokens)
    stats = GenerationStats(prompt_tokens=input_ids.shape[1], block_size=1)
    watch = _Stopwatch(stats, device if profile else None)

    last_logits = _last_logits(target)
    cache = _make_cache(target)
    for piece in input_ids.split(PREFILL_TOKENS, dim=1):
        scored = target(piece, past_key_values=cache, use_cache=True, **last_logits)
    token = scored.logits[:, -1:].argmax(-1)  # [1, 1]
    text.add(token[0].tolist())
    watch.lap("prefill")

    while not text.finish_reason:
        token = target(token, past_key_values=cache, use_cache=True, **last_logits).logits[:, -1:].argmax(-1)
        tokens = token[0].tolist()
        watch.lap("verify")
        stats.acceptance_lengths.append(text.add(tokens))
        watch.lap("other")
    return text.result(stats)


def default_block_size(drafter: DFlash2DraftModel, target: Target) -> int:
    """Rows to verify a round that suit the target's device and dtype: never more than the drafter was trained for."""
    if target.device.type != "cpu":
        return drafter.block_size  # a GPU reads its weights once for all rows, and it is these it waits for
    # What was fastest for SmolLM2-135M on two cores. There eight rows took the target's forward 1.9 times as long as one
    # row in float32; in bfloat16 1.17 times with AMX and 3.3 times without instructions for bfloat16.
    if target.dtype == torch.bfloat16:
        return min(drafter.block_size, 6 if _has_fast_bfloat16() else 3)
    return min(drafter.block_size, 4)


def _has_fast_bfloat16() -> bool:
    features: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # not in every torch
    return any(features.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16", "arm_bf16", "sve_bf16"))


class _Text:
    """The new tokens and the rules that end them."""

    def __init__(
        self,
        target: Target,
        max_new_tokens: int,
        stop_token_ids: Iterable[int] | None,
        on_tokens: Callable[[list[int]], Any] | None,
    ) -> None:
        self.token_ids: list[int] = []
        self.max_new_tokens = max_new_tokens
        self.stops = _stop_tokens(target) if stop_token_ids is None else _checked_stop_tokens(stop_token_ids)
        self.on_tokens = on_tokens
        self.finish_reason: Literal["stop", "length"] | None = None

    @property
    def remaining(self) -> int:
        return self.max_new_tokens - len(self.token_ids)

    def add(self, tokens: list[int]) -> int:
        """Takes tokens, no more than remain, up to the first that stops the text; says how many."""
        stop = next((i for i, token in enumerate(tokens) if token in self.stops), None)
        if stop is not None:
            tokens, self.finish_reason = tokens[: stop + 1], "stop"
        elif len(tokens) == self.remaining:
            self.finish_reason = "length"
        self.token_ids += tokens
        if self.on_tokens:
            self.on_tokens(list(tokens))
        return len(tokens)

    def result(self, stats: GenerationStats) -> GenerationResult:
        assert self.finish_reason
        stats.new_tokens = len(self.token_ids)
        return GenerationResult(self.token_ids, self.finish_reason, stats)


class _Stopwatch:
    """Gives the time since the last lap to a phase of the statistics."""

    def __init__(self, stats: GenerationStats, device: torch.device | None) -> None:
        self.stats = stats
        self.synchronize = getattr(torch, device.type).synchronize if device and device.type != "cpu" else None
        self.last = time.perf_counter()

    def lap(self, phase: str) -> None:
        if self.synchronize:
            self.synchronize()
        now = time.perf_counter()
        name = f"{phase}_seconds"
        setattr(self.stats, name, getattr(self.stats, name) + now - self.last)
        self.last = now


# ---- the target


def _make_cache(target: Target) -> Any:
    try:
        from transformers import DynamicCache
    except ImportError as error:
        raise ImportError("decoding needs transformers: pip install 'torch_dflash2[generate]'") from error
    return DynamicCache(config=target.config)


def _last_logits(target: Target) -> dict[str, int]:
    """The option that leaves out all logits but the last token's, if the target has it."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(target.forward).parameters else {}


def _stop_tokens(target: Target) -> set[int]:
    for config in (getattr(target, "generation_config", None), target.config):
        stops = getattr(config, "eos_token_id", None)
        if stops is not None:
            return set(torch.as_tensor(stops).flatten().tolist())  # a number, a list, or either as a tensor
    return set()


# ---- checks: each raises ValueError with the argument's name, what was expected and what came


def _error(name: str, expected: str, got: object) -> ValueError:
    return ValueError(f"{name}: expected {expected}, got {got}")


def _check_request(target: Target, input_ids: Tensor, max_new_tokens: int) -> torch.device:
    """Returns the device of target and prompt."""
    if target.training:
        raise _error("target", "a model in eval mode (call target.eval())", "one in training mode")
    weight = target.get_input_embeddings().weight
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
        got = getattr(input_ids, "dtype", type(input_ids).__name__)
        raise _error("input_ids", "an int64 or int32 tensor [1, N]", got)
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        shape = list(input_ids.shape)
        raise _error("input_ids", "one prompt, [1, N]; batches are not supported yet", shape)
    if input_ids.shape[1] == 0:
        raise _error("input_ids", "a prompt of at least one token, [1, N]", "an empty prompt, [1, 0]")
    if input_ids.device != weight.device:
        raise _error("input_ids", f"a tensor on the target's device, {weight.device}", input_ids.device)
    low, high = torch.stack(input_ids.aminmax()).tolist()
    if low < 0 or high >= weight.shape[0]:
        raise _error("input_ids", f"token ids in 0..{weight.shape[0] - 1}", f"ids from {low} to {high}")
    if not _is_int(max_new_tokens) or max_new_tokens < 1:
        raise _error("max_new_tokens", "a whole number of at least 1", max_new_tokens)
    return weight.device


def _check_pair(target: Target, drafter: DFlash2DraftModel, device: torch.device) -> None:
    vocabulary, hidden_size = target.get_input_embeddings().weight.shape
    layers = target.config.get_text_config().num_hidden_layers
    config = drafter.config
    if drafter.device != device:
        raise _error("drafter", f"a model on the target's device, {device}", drafter.device)
    if target.get_output_embeddings() is None:
        raise _error("target", "a model with an output head", type(target).__name__)
    if config.hidden_size != hidden_size:
        raise _error("drafter", f"the target's hidden size, {hidden_size}", config.hidden_size)
    if config.vocab_size != vocabulary:
        raise _error("drafter", f"the target's vocabulary, {vocabulary} tokens", config.vocab_size)
    if max(drafter.target_layer_ids) >= layers:
        got = f"target_layer_ids {list(drafter.target_layer_ids)}"
        raise _error("drafter", f"taps on the target's layers, 0..{layers - 1}", got)


def _check_block_size(drafter: DFlash2DraftModel, block_size: int) -> int:
    if not _is_int(block_size) or not 2 <= block_size <= drafter.block_size:
        raise _error("block_size", f"a whole number in 2..{drafter.block_size}, the size trained for", block_size)
    return block_size


def _checked_stop_tokens(stop_token_ids: Iterable[int]) -> set[int]:
    stops = list(stop_token_ids) if isinstance(stop_token_ids, Iterable) else [None]
    if isinstance(stop_token_ids, (str, bytes)) or not all(_is_int(token) and token >= 0 for token in stops):
        raise _error("stop_token_ids", "token ids, as a list of whole numbers", repr(stop_token_ids))
    return {int(token) for token in stops}


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
