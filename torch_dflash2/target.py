"""The target model and what it has read of each lane's text.

transformers' own cache holds texts of one length and gives back tokens from the end of all of them. Here every lane has a
length of its own, and giving tokens back is no more than remembering a smaller one: what lies beyond is overwritten.
"""

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

Target = Any  # a transformers.PreTrainedModel with an output head

# Targets with recurrent state that lies in their cache and is right after several tokens at once; of others it is not known.
RECURRENT = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
GROWTH = 256  # tokens: keys and values are kept in buffers whose length is a multiple of this


def transformers_cache(target: Target) -> Any:
    """A transformers cache for one text, with the kinds of layers that the target has."""
    try:
        from transformers import DynamicCache
    except ImportError as error:
        raise ImportError("decoding needs transformers: pip install 'torch_dflash2[generate]'") from error
    if "past_key_values" not in inspect.signature(target.forward).parameters:
        raise ValueError(f"target: expected a model that takes past_key_values, got {type(target).__name__}")
    text_config = target.config.get_text_config(decoder=True)
    if hasattr(text_config, "index_topk") and text_config._attn_implementation == "sdpa":
        # transformers 5.15 adds sdpa's boolean mask to the scores that keys are picked by: rows pick keys of later rows.
        raise ValueError("target: expected attn_implementation eager, as sparse attention is wrong for several rows with sdpa")
    return DynamicCache(config=target.config)


class TargetLanes:
    """A target and, for each of its lanes, the tokens it has read.

    lengths  tokens that count of each lane. `read` leaves them; `keep` moves them on.

    rewinds: asks for `fork` and `rewind`. They and more than one lane take targets of full and sliding attention only, and
    keep keys and values of the whole text in sliding layers as well. One lane without them takes any target that
    transformers can roll back, and of those with recurrent state the ones in RECURRENT, which read accepted tokens twice.
    Raises ValueError for others, but at the call of `fork` or `rewind`.
    """

    def __init__(self, model: Target, lanes: int, *, rewinds: bool = False) -> None:
        self.model, self.lanes = model, lanes
        self.lengths = [0] * lanes
        cache = transformers_cache(model)
        attention_only = _is_attention_only(model, cache)
        windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
        self.rewinds = attention_only and (rewinds or lanes > 1 or set(windows) == {None})
        if self.rewinds:
            self.layers = [_Layer(self, window) for window in windows]
            cache.layers = [_cache_layer_class()(self, layer) for layer in self.layers]
        elif getattr(model, "_is_stateful", False) and _model_type(model) not in RECURRENT:
            raise ValueError(
                f"target: expected no recurrent state, or a model of {', '.join(RECURRENT)}, got {_model_type(model)}"
            )
        elif lanes > 1:
            raise ValueError(
                f"target: expected full and sliding attention only to decode several prompts at once, got {_kinds(model)}"
            )
        else:
            cache.activate_past_recording()  # without it a sliding window could not give back rejected tokens
        if lanes > 1:
            _check_takes_masks(model)
        self.cache = cache
        self.lane: int | None = 0  # the one that is being read, None for all
        self.positions: Tensor | None = None  # [lanes, tokens] that are being read
        self.unkept = torch.empty(1, 0)  # tokens read since the last keep
        self.states: list[Any] = []  # of recurrent layers, before they were read

    @torch.no_grad()
    def read(self, ids: Tensor, *, lane: int | None = None, lengths: Tensor | None = None, **options: Any) -> Any:
        """Reads tokens after each lane's own, and returns the model's output: logits and hidden states.

        ids: [lanes, R], or [1, R] of one `lane`. lengths: self.lengths as int32 [lanes] on the device, needed for all lanes.
        """
        self.lane = 0 if self.lanes == 1 else lane
        if self.lane is None:
            assert lengths is not None
            self.positions = lengths[:, None] + torch.arange(ids.shape[1], device=ids.device)
            options |= {"position_ids": self.positions, "attention_mask": self._masks()}
        self.unkept = ids
        if not self.rewinds:
            self.states = [_recurrent_state(layer) for layer in self.cache.layers]
        return self.model(ids, past_key_values=self.cache, use_cache=True, output_hidden_states=True, **options)

    def keep(self, counts: list[int]) -> None:
        """Of what was just read, each lane keeps its first tokens. For one lane of many, the others' counts are 0."""
        if not self.rewinds:
            self._crop(counts[0])
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def _crop(self, count: int) -> None:
        """Takes rejected tokens out of a transformers cache."""
        rejected = self.unkept.shape[1] - count
        if not rejected or not any(self.states):
            self.cache.crop(-rejected)  # 0 too: a sliding window lets go of what it no longer needs
            return
        # A recurrent state has no way back from a token: the one before the block is put back, and reads what is kept.
        self.cache.crop(-self.unkept.shape[1])
        for layer, state in zip(self.cache.layers, self.states, strict=True):
            if state:
                layer.conv_states, layer.recurrent_states = state
        if count:
            self.model(self.unkept[:, :count], past_key_values=self.cache, use_cache=True)
            self.cache.crop(0)

    def rewind(self, lane: int, length: int) -> None:
        """Forgets all but a lane's first `length` tokens."""
        if not self.rewinds:
            raise ValueError(f"target: expected full and sliding attention only to go back in a text, got {_kinds(self.model)}")
        self.lengths = [length if lane == other else kept for other, kept in enumerate(self.lengths)]

    def fork(self) -> "TargetLanes":
        """A copy with keys and values of its own, of the same model."""
        if not self.rewinds:
            raise ValueError(f"target: expected full and sliding attention only to fork a text, got {_kinds(self.model)}")
        other = TargetLanes(self.model, self.lanes, rewinds=True)
        other.lengths = list(self.lengths)
        for ours, theirs in zip(self.layers, other.layers, strict=True):
            theirs.buffers = tuple(buffer.clone() for buffer in ours.buffers)
        return other

    def _masks(self) -> Tensor | dict[str, Tensor]:
        """To be added to the scores, [lanes, 1, tokens, slots]: a token sees those of its lane up to itself."""
        assert self.positions is not None
        slots = torch.arange(max(self.lengths) + self.positions.shape[1], device=self.positions.device)
        ages = self.positions[:, None, :, None] - slots
        dtype = self.model.dtype

        def mask(window: int | None) -> Tensor:
            hidden = (ages < 0) if window is None else (ages < 0) | (ages >= window)
            return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, torch.finfo(dtype).min)

        windows = {layer.window for layer in self.layers}
        if len(windows) == 1:
            return mask(windows.pop())
        kinds = self.model.config.get_text_config(decoder=True).layer_types
        return {kind: mask(layer.window) for kind, layer in dict(zip(kinds, self.layers, strict=True)).items()}


class _Layer:
    """Keys and values of one layer, each [lanes, heads, slots, head size]: token number t of a lane is in slot t."""

    def __init__(self, target: TargetLanes, window: int | None) -> None:
        self.target, self.window = target, window
        self.buffers: tuple[Tensor, ...] = ()

    def update(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Takes keys and values of the tokens being read, [lanes or 1, heads, tokens, head size]; returns all so far."""
        target, tokens = self.target, new[0].shape[2]
        self._grow(max(target.lengths) + tokens, new)
        if target.lane is not None:
            start = target.lengths[target.lane]
            seen = tuple(buffer[target.lane : target.lane + 1, :, : start + tokens] for buffer in self.buffers)
            for those, these in zip(seen, new, strict=True):
                those[:, :, start:] = these
            return seen
        lane = torch.arange(target.lanes, device=new[0].device)[:, None]
        for buffer, these in zip(self.buffers, new, strict=True):
            buffer[lane, :, target.positions] = these.transpose(1, 2)
        return tuple(buffer[:, :, : max(target.lengths) + tokens] for buffer in self.buffers)

    def _grow(self, slots: int, like: tuple[Tensor, ...]) -> None:
        held = self.buffers[0].shape[2] if self.buffers else 0
        if slots <= held:
            return
        slots = -(-max(slots, held + held // 2) // GROWTH) * GROWTH
        grown = tuple(x.new_zeros(self.target.lanes, x.shape[1], slots, x.shape[3]) for x in like)
        for buffer, old in zip(grown, self.buffers, strict=False):
            buffer[:, :, :held] = old
        self.buffers = grown


@functools.cache
def _cache_layer_class() -> type:
    """A _Layer as transformers wants it; made late, since transformers is imported late."""
    from transformers.cache_utils import DynamicLayer

    class LaneLayer(DynamicLayer):
        def __init__(self, target: TargetLanes, layer: _Layer) -> None:
            super().__init__()
            self.target, self.layer = target, layer

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            keys, values = self.layer.update(key_states, value_states)
            return keys, values

        def get_seq_length(self) -> int:  # of the one lane that is being read; the masks of several are our own
            return self.target.lengths[self.target.lane or 0]

    return LaneLayer


def _recurrent_state(layer: Any) -> tuple[dict[int, Any], dict[int, Any]] | None:
    """A copy of what a layer of recurrent or convolutional attention remembers; None for others."""
    if not hasattr(layer, "recurrent_states"):
        return None
    conv, recurrent = (
        {i: x if x is None else x.clone() for i, x in s.items()} for s in (layer.conv_states, layer.recurrent_states)
    )
    return conv, recurrent


def _model_type(model: Target) -> str:
    return model.config.get_text_config(decoder=True).model_type


def _kinds(model: Target) -> str:
    return ", ".join(sorted(set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ["other layers"])))


def _is_attention_only(model: Target, cache: Any) -> bool:
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or []
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
    return bool(cache.layers) and plain and "chunked_attention" not in kinds and not getattr(model, "_is_stateful", False)


def _check_takes_masks(model: Target) -> None:
    attention = getattr(model.config, "_attn_implementation", None)
    if attention not in ("sdpa", "eager"):
        raise ValueError(
            f"target: expected attn_implementation sdpa or eager to decode several prompts at once, got {attention}"
        )
    config, takes = model.config, inspect.signature(model.forward).parameters
    # GPT-Neo cuts its local masks by the longest text; ALiBi makes its own from them.
    if "position_ids" not in takes or _model_type(model) == "gpt_neo" or getattr(config, "alibi", False):
        raise ValueError(
            "target: expected a model that takes position_ids and masks as given to decode several prompts at once, "
            f"got {type(model).__name__}"
        )
