"""Lossless speculative decoding of a Hugging Face causal LM, the target, with a DFlash drafter.

A round: the drafter fills a block: the anchor, which is the newest token of the text, and the tokens drafted to follow it.
One forward of the target scores every row of the block. Drafts are accepted up to the first that is not the target's own
choice; that choice, which the same forward gave, follows them and is the next anchor. So the target decides every token,
and the drafter decides only how many come at a time. (With sampling, chance has a part in accepting: see `sampling.py`.)

`generate` runs rounds of `Decoder` for one prompt or many. `greedy_generate` is the same without a drafter, one token a
forward: the oracle and the baseline.
"""

import functools
import inspect
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .drafter import DFlashDraftModel
from .sampling import Drafts, Sampling, verify
from .target import Target, TargetLanes, transformers_cache

# A longer prompt is read in pieces of this many tokens, since all layers' hidden states of a piece are alive at once.
PREFILL_TOKENS = 1024

MAX_LANES = 4  # that the operators take


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
    drafter: DFlashDraftModel,
    input_ids: Tensor | Sequence[Tensor],
    *,
    max_new_tokens: int,
    stop_token_ids: Iterable[int] | None = None,
    block_size: int | None = None,
    sampling: Sampling | None = None,
    compile: bool = False,
    on_tokens: Callable[..., Any] | None = None,
    profile: bool = False,
) -> Any:
    """Continues prompts with the target's own choices, several a forward where the drafter foresaw them.

    target: a Hugging Face causal LM in eval mode.
    drafter: made for this target, on the same device; its dtype may differ.
    input_ids: a prompt, int64 or int32 [1, N], N >= 1, on the same device; or a list of prompts of any lengths, of which up
        to four are decoded at once, each in a lane of its own, which takes the next prompt as soon as its text ends.
    max_new_tokens: at least 1, for each prompt.
    stop_token_ids: each ends the text and is part of it; the target's own if left out, () for none.
    block_size: rows that the target verifies a round, 2 up to the drafter's; `default_block_size` if left out.
    sampling: draws tokens from the target's distribution; greedy if left out.
    compile: runs the drafter through torch.compile. The first rounds take longer, by the compiler's time.
    on_tokens: called with each list of token ids as soon as they are certain; for a list of prompts with the prompt's
        number as second argument.
    profile: waits for the device after each phase, for true seconds a phase on any device; slower where that matters.

    Returns a GenerationResult, or a list of them for a list of prompts. Greedy tokens are those of `greedy_generate`, as far
    as the target's choices do not depend on how many rows it scores at once: in float32 a difference takes two tokens whose
    logits agree to rounding; in bfloat16 it is common. Sampled tokens have the distribution that the target alone has.
    Raises ValueError, naming the argument, for what cannot be decoded. All state is the call's own: after an error or an
    interrupt, target and drafter are as before.
    """
    single = isinstance(input_ids, Tensor)
    prompts: list[Any] = [input_ids] if single else list(input_ids)
    if not prompts:
        raise argument_error("input_ids", "at least one prompt", "an empty list")
    for number, prompt in enumerate(prompts):
        check_prompt(target, prompt, "input_ids" if single else f"input_ids[{number}]")
    decoder = Decoder(
        target,
        drafter,
        min(len(prompts), MAX_LANES),
        block_size=block_size,
        sampling=sampling,
        stop_token_ids=stop_token_ids,
        compile=compile,
    )
    texts = [
        Text(
            decoder.stops,
            decoder.block_size,
            prompt.shape[1],
            max_new_tokens,
            on_tokens if single or on_tokens is None else functools.partial(_call_swapped, on_tokens, number),
        )
        for number, prompt in enumerate(prompts)
    ]
    watch = Stopwatch(decoder.device if profile else None)
    waiting, running = deque(zip(prompts, texts, strict=True)), dict[int, Text]()
    while waiting or running:
        for lane in range(decoder.lanes):
            if waiting and lane not in running:
                prompt, running[lane] = waiting.popleft()
                decoder.reset(lane)
                watch.start(running[lane].stats)
                running[lane].add([decoder.prefill(lane, prompt, max_new_tokens, watch)])
                watch.lap("prefill")
                watch.start(*(text.stats for text in running.values()))
        running = {lane: text for lane, text in running.items() if not text.finish_reason}
        if running:
            new = decoder.round(max(text.remaining for text in running.values()), watch)
            for lane, text in running.items():
                text.stats.acceptance_lengths.append(text.add(new[lane]))
            watch.lap("other")
            watch.start(*(text.stats for text in running.values() if not text.finish_reason))
    results = [text.result() for text in texts]
    return results[0] if single else results


class Decoder:
    """A target and its drafter in step, on 1..4 lanes. `generate` and `Session` are loops around it.

    Of each lane, both have read the same tokens: all of its text but the newest token, the anchor. Arguments are those of
    `generate` and `TargetLanes`; the methods run in inference mode.

    remaining  int32 [lanes], on the device: how many tokens each lane may still take, 0 where its text has ended.
    """

    def __init__(
        self,
        target: Target,
        drafter: DFlashDraftModel,
        lanes: int = 1,
        *,
        block_size: int | None = None,
        sampling: Sampling | None = None,
        stop_token_ids: Iterable[int] | None = None,
        compile: bool = False,
        rewinds: bool = False,
    ) -> None:
        self.device = _check_pair(target, drafter)
        if not isinstance(sampling, Sampling | None):
            raise argument_error("sampling", "a Sampling, or None for greedy", type(sampling).__name__)
        self.stops = _stop_tokens(target) if stop_token_ids is None else _checked_stop_tokens(stop_token_ids)
        self.drafter, self.lanes, self.sampling = drafter, lanes, sampling
        self.block_size = _check_block_size(drafter, default_block_size(drafter, target) if block_size is None else block_size)
        self.embedding, self.head = target.get_input_embeddings(), target.get_output_embeddings()
        self.target, self.cache = TargetLanes(target, lanes, rewinds=rewinds), drafter.make_cache(lanes)
        self.anchors = torch.zeros(lanes, 1, dtype=torch.int64, device=self.device)
        self.remaining = torch.zeros(lanes, dtype=torch.int32, device=self.device)
        self.stop_ids = torch.tensor(sorted(self.stops), dtype=torch.int64, device=self.device)
        self.features: Tensor | None = None  # of the tokens that the last round read, [lanes, rows, hidden]
        self._draft, self._propose = self._draft_block, self._propose_tokens
        if compile:
            self._draft = _compiled(self._draft)
            if sampling is None:  # a random generator would break the graph
                self._propose = _compiled(self._propose)

    def reset(self, lane: int) -> None:
        """Empties a lane; the others go on."""
        self.target.lengths[lane] = 0
        self.cache.reset(lane)

    def prefill(
        self, lane: int, ids: Tensor, max_new_tokens: int, watch: "Stopwatch", features: list[Tensor] | None = None
    ) -> int:
        """Reads ids [1, N] after a lane's tokens and returns the first new one, of `max_new_tokens` that it may take.

        features: takes what the drafter keeps of the tokens, [1, n, hidden] each.
        """
        ring = self.cache.lane(lane)
        for piece in ids.split(PREFILL_TOKENS, dim=1):
            scored = self.target.read(piece, lane=lane, **_last_logits(self.target.model))
            watch.lap("prefill")
            context = self.drafter.context_features(scored.hidden_states)
            self.drafter.prefill_context(ring, context)
            self.target.keep([piece.shape[1] if other == lane else 0 for other in range(self.lanes)])
            if features is not None:
                features.append(context)
            watch.lap("commit")
        logits = scored.logits[:, -1, : self.drafter.config.vocab_size]
        self.anchors[lane] = (
            logits.argmax(-1) if self.sampling is None else self.sampling.draw(self.sampling.probabilities(logits))
        )
        (token,) = self.anchors[lane].tolist()
        self.remaining[lane] = 0 if token in self.stops else max_new_tokens - 1
        return token

    def round(self, most: int, watch: "Stopwatch") -> list[list[int]]:
        """Drafts and verifies a block of each lane; returns the new tokens of each, none of a lane that has ended.

        most: the largest of `remaining`, at least 1, which the host knows.
        """
        rows = min(self.block_size, most)  # no lane can use more
        block = self.anchors
        if rows > 1:
            hidden = self._draft()
            watch.lap("draft")
            drafts = self._propose(hidden).first(rows - 1)
            block = torch.cat([block, drafts.token_ids], dim=1)
            watch.lap("propose")

        scored = self.target.read(block, lengths=self.cache.token_counts)
        logits = scored.logits[..., : self.drafter.config.vocab_size]  # a head may be padded
        if self.sampling is None:
            tokens = logits.argmax(-1)  # [lanes, rows]: what the target puts after each row
            accepted = (block[:, 1:] == tokens[:, :-1]).cumprod(1).sum(1)
        elif rows > 1:
            accepted, following = verify(self.sampling, drafts, logits)
            tokens = F.pad(block[:, 1:], (0, 1)).scatter(1, accepted[:, None], following[:, None])
        else:
            tokens = self.sampling.draw(self.sampling.probabilities(logits))
            accepted = tokens.new_zeros(self.lanes)

        # A lane takes the accepted drafts and the token after them, up to its first stop token and what remains to it.
        going_on = ~(tokens[..., None] == self.stop_ids).any(-1)
        counts = torch.minimum(accepted, going_on.cumprod(1).sum(1)) + 1
        counts = torch.minimum(counts, self.remaining).int()
        last = (counts - 1).clamp(min=0)[:, None].long()
        self.remaining = (self.remaining - counts) * going_on.gather(1, last).squeeze(1)
        self.anchors = torch.where(counts[:, None] > 0, tokens.gather(1, last), self.anchors)
        watch.lap("verify")
        # The old anchor and the accepted drafts are certain and read by the target. The new anchor is not read yet.
        self.features = self.drafter.context_features(scored.hidden_states)
        self.drafter.commit_context(self.cache, self.features, counts)
        watch.lap("commit")

        result = torch.cat([counts[:, None], tokens], 1).tolist()  # the round's one read
        new = [taken[1 : 1 + taken[0]] for taken in result]
        self.target.keep([len(taken) for taken in new])
        self.cache.longest = max(self.target.lengths)
        watch.lap("verify")
        return new

    def _draft_block(self) -> Tensor:
        block = self.drafter.embed_block(self.embedding, self.anchors[:, 0], self.block_size)
        return self.drafter(block, self.cache)[:, 1:]

    def _propose_tokens(self, hidden: Tensor) -> Drafts:
        if self.sampling is None:
            return Drafts(self.drafter.propose(hidden, self.anchors[:, 0], self.head))
        return self.drafter.sample(hidden, self.anchors[:, 0], self.head, self.sampling)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(function, fullgraph=True)

    def call(*args: Any) -> Any:
        # All decoders share the function's graphs. Each drafter, block size and number of lanes needs its own.
        with torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=4096):
            return compiled(*args)

    return call


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
    device = check_prompt(target, input_ids, "input_ids")
    stops = _stop_tokens(target) if stop_token_ids is None else _checked_stop_tokens(stop_token_ids)
    text = Text(stops, 1, input_ids.shape[1], max_new_tokens, on_tokens)
    watch = Stopwatch(device if profile else None)
    watch.start(text.stats)

    last_logits, vocabulary = _last_logits(target), target.get_input_embeddings().weight.shape[0]
    cache = transformers_cache(target)
    for piece in input_ids.split(PREFILL_TOKENS, dim=1):
        scored = target(piece, past_key_values=cache, use_cache=True, **last_logits)
    token = scored.logits[:, -1:, :vocabulary].argmax(-1)  # [1, 1]
    text.add(token[0].tolist())
    watch.lap("prefill")

    while not text.finish_reason:
        scored = target(token, past_key_values=cache, use_cache=True, **last_logits)
        token = scored.logits[:, -1:, :vocabulary].argmax(-1)
        tokens = token[0].tolist()
        watch.lap("verify")
        text.stats.acceptance_lengths.append(text.add(tokens))
        watch.lap("other")
    return text.result()


def default_block_size(drafter: DFlashDraftModel, target: Target) -> int:
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


def _call_swapped(on_tokens: Callable[[list[int], int], Any], number: int, tokens: list[int]) -> None:
    on_tokens(tokens, number)


class Text:
    """The new tokens of one prompt and the rules that end them."""

    def __init__(
        self,
        stops: set[int],
        block_size: int,
        prompt_tokens: int,
        max_new_tokens: int,
        on_tokens: Callable[[list[int]], Any] | None,
    ) -> None:
        if not is_whole(max_new_tokens) or not 1 <= max_new_tokens < 2**31:
            raise argument_error("max_new_tokens", "a whole number of at least 1, below 2**31", max_new_tokens)
        self.token_ids: list[int] = []
        self.stops, self.max_new_tokens, self.on_tokens = stops, max_new_tokens, on_tokens
        self.finish_reason: Literal["stop", "length"] | None = None
        self.stats = GenerationStats(prompt_tokens=prompt_tokens, block_size=block_size)

    @property
    def remaining(self) -> int:
        return self.max_new_tokens - len(self.token_ids)

    def add(self, tokens: list[int]) -> int:
        """Takes tokens, no more than remain and only the last of them a stop token; says how many."""
        self.token_ids += tokens
        if tokens[-1] in self.stops:
            self.finish_reason = "stop"
        elif not self.remaining:
            self.finish_reason = "length"
        if self.on_tokens:
            with torch.inference_mode(False):
                self.on_tokens(list(tokens))
        return len(tokens)

    def result(self) -> GenerationResult:
        assert self.finish_reason
        self.stats.new_tokens = len(self.token_ids)
        return GenerationResult(self.token_ids, self.finish_reason, self.stats)


class Stopwatch:
    """Gives the time since the last lap to a phase of the statistics of all texts that are being decoded."""

    def __init__(self, device: torch.device | None) -> None:
        self.stats: tuple[GenerationStats, ...] = ()
        self.synchronize = getattr(torch, device.type).synchronize if device and device.type != "cpu" else None
        self.last = time.perf_counter()

    def start(self, *stats: GenerationStats) -> None:
        self.stats = stats

    def lap(self, phase: str) -> None:
        if self.synchronize:
            self.synchronize()
        now = time.perf_counter()
        name = f"{phase}_seconds"
        for stats in self.stats:
            setattr(stats, name, getattr(stats, name) + now - self.last)
        self.last = now


# ---- the target


def _last_logits(target: Target) -> dict[str, Any]:
    """The option that leaves out all logits but the last token's, if the target has it."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(target.forward).parameters else {}


def _stop_tokens(target: Target) -> set[int]:
    for config in (getattr(target, "generation_config", None), target.config):
        stops = getattr(config, "eos_token_id", None)
        if stops is not None:
            return set(torch.as_tensor(stops).flatten().tolist())  # a number, a list, or either as a tensor
    return set()


# ---- checks: each raises ValueError with the argument's name, what was expected and what came


def argument_error(name: str, expected: str, got: object) -> ValueError:
    return ValueError(f"{name}: expected {expected}, got {got}")


def _check_target(target: Target) -> None:
    if not isinstance(target, torch.nn.Module) or not hasattr(target, "get_output_embeddings"):
        raise argument_error("target", "a Hugging Face causal LM", type(target).__name__)


def check_prompt(target: Target, ids: Tensor, name: str) -> torch.device:
    """Returns the device of target and prompt."""
    _check_target(target)
    if target.training:
        raise argument_error("target", "a model in eval mode (call target.eval())", "one in training mode")
    weight = target.get_input_embeddings().weight
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        raise argument_error(name, "an int64 or int32 tensor [1, N]", getattr(ids, "dtype", type(ids).__name__))
    if ids.dim() != 2 or ids.shape[0] != 1:
        raise argument_error(name, "one prompt, [1, N], or for `generate` a list of them", list(ids.shape))
    if ids.shape[1] == 0:
        raise argument_error(name, "a prompt of at least one token, [1, N]", "an empty prompt, [1, 0]")
    if ids.device != weight.device:
        raise argument_error(name, f"a tensor on the target's device, {weight.device}", ids.device)
    low, high = torch.stack(ids.aminmax()).tolist()
    if low < 0 or high >= weight.shape[0]:
        raise argument_error(name, f"token ids in 0..{weight.shape[0] - 1}", f"ids from {low} to {high}")
    return weight.device


def _check_pair(target: Target, drafter: DFlashDraftModel) -> torch.device:
    """Returns the device of both."""
    _check_target(target)
    if not isinstance(drafter, DFlashDraftModel):
        raise argument_error("drafter", "a DFlashDraftModel or DFlash2DraftModel", type(drafter).__name__)
    vocabulary, hidden_size = target.get_input_embeddings().weight.shape
    device = target.get_input_embeddings().weight.device
    layers = target.config.get_text_config().num_hidden_layers
    config = drafter.config
    if drafter.device != device:
        raise argument_error("drafter", f"a model on the target's device, {device}", drafter.device)
    if target.get_output_embeddings() is None:
        raise argument_error("target", "a model with an output head", type(target).__name__)
    if config.hidden_size != hidden_size:
        raise argument_error("drafter", f"the target's hidden size, {hidden_size}", config.hidden_size)
    if config.vocab_size != vocabulary:
        raise argument_error("drafter", f"the target's vocabulary, {vocabulary} tokens", config.vocab_size)
    if max(drafter.target_layer_ids) >= layers:
        got = f"target_layer_ids {list(drafter.target_layer_ids)}"
        raise argument_error("drafter", f"taps on the target's layers, 0..{layers - 1}", got)
    return device


def _check_block_size(drafter: DFlashDraftModel, block_size: int) -> int:
    if not is_whole(block_size) or not 2 <= block_size <= drafter.block_size:
        raise argument_error("block_size", f"a whole number in 2..{drafter.block_size}, the size trained for", block_size)
    return int(block_size)


def _checked_stop_tokens(stop_token_ids: Iterable[int]) -> set[int]:
    stops = list(stop_token_ids) if isinstance(stop_token_ids, Iterable) else [None]
    if isinstance(stop_token_ids, (str, bytes)) or not all(is_whole(token) and 0 <= token < 2**31 for token in stops):
        raise argument_error("stop_token_ids", "token ids, as a list of whole numbers", repr(stop_token_ids))
    return {int(token) for token in stops}


def is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
