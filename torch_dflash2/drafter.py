"""DFlash drafters: small transformers that draft a block of tokens at once from a target model's hidden states.

`DFlashDraftModel` is the first version; `DFlash2DraftModel` adds convolutions within the block and a selector that picks
each token by the one before it. Read from top to bottom: the configuration, the parts of a layer, a layer, the models. One
drafting round is

    embeddings = drafter.embed_block(embedding, anchor_ids)      # the anchor, then mask tokens   [B, R, hidden]
    hidden = drafter(embeddings, cache)                          #                                [B, R, hidden]
    drafts = drafter.propose(hidden[:, 1:], anchor_ids, head)    # token ids                      [B, R - 1]
    ...                                                          # the target verifies anchor and drafts, R rows
    features = drafter.context_features(target_hidden_states)    # of the rows it verified        [B, R, hidden]
    drafter.commit_context(cache, features, counts)              # anchor and accepted drafts: counts = accepted + 1

before the first of which the prompt's hidden states go through `context_features` and `prefill_context`. The anchor is
the last token that is certain and not yet committed. B lanes, R rows of a block, H query heads, Hk key/value heads,
D head size. Embedding and output head are the target's. Nothing here waits for the device.
"""

import json
import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import MAX_ROWS, MAX_SLOTS, RingKVCache
from .sampling import Drafts, Sampling

MAX_SIZE = MAX_SLOTS  # of any number in a config, far above what there is
MAX_LAYERS = 1024
GRANULE = 128  # tokens: attention covers a multiple of so many, where the text is shorter than the window
Rotation = tuple[Tensor, Tensor]  # cosines and signed sines, [B, tokens, 1, D]


@dataclass(frozen=True)
class Rope:
    """How positions turn queries and keys: `default`, `linear` or `yarn`, as Hugging Face names and computes them."""

    rope_type: str
    theta: float
    factor: float = 1.0  # linear, yarn: how many times as long a text may be as without it
    attention_factor: float = 1.0  # yarn: what cosines and sines are multiplied by
    beta_fast: float = 32.0  # yarn: pairs that turn more often than this over the original length are left alone,
    beta_slow: float = 1.0  # ... those that turn less often than this are slowed down by the factor
    original_length: int = 0  # yarn: positions trained without it
    truncate: bool = True  # yarn: whether both ends between these are whole numbers of pairs

    def frequencies(self, head_dim: int) -> Tensor:
        """Radians a position for each pair of elements, float32 [head_dim / 2]."""
        pairs = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu")
        plain = 1.0 / self.theta ** (pairs / head_dim)
        if self.rope_type != "yarn":
            return plain / self.factor

        def pair_that_turns(times: float) -> float:
            return head_dim * math.log(self.original_length / (times * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        slowed = ((pairs / 2 - low) / (high - low or 0.001)).clamp(0, 1)
        return plain / self.factor * slowed + plain * (1 - slowed)


@dataclass(frozen=True)
class DraftConfig:
    """A drafter's geometry. Made by `from_dict` or `from_json`, which refuse what this package does not do."""

    architecture: str  # DFlashDraftModel or DFlash2DraftModel
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    layer_types: tuple[str, ...]  # sliding_attention or full_attention
    sliding_window: int | None  # of sliding layers
    is_causal: bool | None  # whether a row sees no later row of its block; None: it does not in sliding layers
    rms_norm_eps: float
    rope: Rope
    attention_bias: bool
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # of the target's layers whose outputs are tapped, from 0
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float  # 0 or below: none
    conv_kernel_size: int = 0  # this and what follows: 0 in a DFlashDraftModel
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's window, None where it attends to everything."""
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_types)

    @property
    def causal(self) -> tuple[bool, ...]:
        """Whether each layer's rows see no later row of their block."""
        sliding = [kind == "sliding_attention" for kind in self.layer_types]
        return tuple(sliding) if self.is_causal is None else (self.is_causal,) * len(sliding)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in (int, "int"):
                _check_whole(field.name, value)
            if field.type in (bool, "bool") and not isinstance(value, bool):
                raise _config_error(field.name, "true or false", value)
            if field.type in (float, "float") and not _is_number(value):
                raise _config_error(field.name, "a finite number", value)
        if self.sliding_window is not None:
            _check_whole("sliding_window", self.sliding_window)
        if self.is_causal is not None and not isinstance(self.is_causal, bool):
            raise _config_error("is_causal", "true or false", self.is_causal)
        if not all(_is_whole(layer) for layer in self.target_layer_ids):
            raise _config_error("target_layer_ids", "whole numbers", list(self.target_layer_ids))
        top = max(self.target_layer_ids, default=-1)
        window = self.sliding_window
        checks: list[tuple[str, bool, str]] = [
            ("hidden_size", self.hidden_size >= 1, "at least 1"),
            ("num_hidden_layers", self.num_hidden_layers >= 1, "at least 1"),
            ("num_key_value_heads", self.num_key_value_heads >= 1, "at least 1"),
            (
                "num_attention_heads",
                self.num_attention_heads >= 1 and self.num_attention_heads % max(1, self.num_key_value_heads) == 0,
                f"a multiple of num_key_value_heads = {self.num_key_value_heads}",
            ),
            ("head_dim", self.head_dim in (128, 256), "128 or 256"),
            ("block_size", 2 <= self.block_size <= MAX_ROWS, f"2..{MAX_ROWS}"),
            ("rms_norm_eps", self.rms_norm_eps > 0, "above 0"),
            ("sliding_window", window is None or window > self.block_size, f"more than block_size = {self.block_size}"),
            ("mask_token_id", self.mask_token_id < self.vocab_size, f"below vocab_size = {self.vocab_size}"),
            ("target_layer_ids", top >= 0 and min(self.target_layer_ids) >= 0, "one or more layer numbers from 0"),
        ]
        if self.architecture == "DFlash2DraftModel":
            checks += [
                ("conv_kernel_size", self.conv_kernel_size >= 1, "at least 1"),
                (
                    "conv_group_size",
                    self.conv_group_size >= 1 and self.hidden_size % self.conv_group_size == 0,
                    f"a divisor of hidden_size = {self.hidden_size}",
                ),
                ("selector_rank", self.selector_rank >= 1, "at least 1"),
                ("selector_top_k", 1 <= self.selector_top_k <= self.vocab_size, f"1..vocab_size = {self.vocab_size}"),
            ]
        for name, fits, expected in checks:
            if not fits:
                raise _config_error(name, expected, getattr(self, name))

    @classmethod
    def from_json(cls, path: str | pathlib.Path) -> "DraftConfig":
        """Reads a published `config.json`."""
        config = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise _config_error(str(path), "a JSON object", config)
        return cls.from_dict(config)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "DraftConfig":
        """Reads the fields of a published `config.json`; raises ValueError naming the field that is not supported."""
        draft = _fields_in(config, "dflash_config")
        for name in draft:
            if name not in (*_DRAFT_FIELDS, *_DFLASH2_FIELDS):
                raise _config_error(f"dflash_config.{name}", f"one of {', '.join(_DRAFT_FIELDS + _DFLASH2_FIELDS)}", name)
        merged = {**config, **draft}

        def required(name: str) -> Any:
            if merged.get(name) is None:
                raise _config_error(name, "a value", "none")
            return merged[name]

        def optional(name: str, default: Any) -> Any:
            value = merged.get(name)
            return default if value is None else value

        # What would change the arithmetic is refused, never ignored.
        architecture = _architecture(config.get("architectures"), merged)
        if architecture == "DFlashDraftModel":
            for name in _DFLASH2_FIELDS:
                if merged.get(name) is not None:
                    raise _config_error(name, "none in a DFlashDraftModel", merged[name])
        for name, expected, default in (
            ("hidden_act", "silu", "silu"),
            ("partial_rotary_factor", 1.0, 1.0),
            *((name, None, None) for name in _NOT_SUPPORTED),
        ):
            got = default if config.get(name) is None else config[name]
            if got != expected:
                raise _config_error(name, expected, got)
        for name in merged:
            if "sink" in name and merged[name]:
                raise _config_error(name, "no attention sinks", merged[name])
        layers = required("num_hidden_layers")
        _check_whole("num_hidden_layers", layers, MAX_LAYERS)
        layer_types, sliding_window = _layer_types(config, layers)
        heads = required("num_attention_heads")
        taps = merged.get("target_layer_ids")
        if taps is not None and not isinstance(taps, (list, tuple)):
            raise _config_error("target_layer_ids", "a list of layer numbers", taps)
        if taps is None:
            _check_whole("num_target_layers", required("num_target_layers"))
            taps = _evenly_spaced(required("num_target_layers"), layers)
        return cls(
            architecture=architecture,
            hidden_size=required("hidden_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=optional("num_key_value_heads", heads),
            head_dim=optional("head_dim", 128),
            intermediate_size=required("intermediate_size"),
            vocab_size=required("vocab_size"),
            layer_types=layer_types,
            sliding_window=sliding_window,
            is_causal=config.get("is_causal"),
            rms_norm_eps=optional("rms_norm_eps", 1e-6),
            rope=_rope(config),
            attention_bias=optional("attention_bias", False),
            block_size=optional("block_size", 16),
            mask_token_id=required("mask_token_id"),
            target_layer_ids=tuple(taps),
            input_embedding_scale=optional("input_embedding_scale", 1.0),
            output_multiplier=optional("output_multiplier", 1.0),
            final_logit_softcapping=optional("final_logit_softcapping", 0.0),
            **{name: required(name) for name in _DFLASH2_FIELDS if architecture == "DFlash2DraftModel"},
        )


# The fields that a config keeps in its `dflash_config`, or else at its top level; the second ones are DFlash 2's own.
_DRAFT_FIELDS = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
)
_DFLASH2_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")

# What other models have and these do not.
_NOT_SUPPORTED = (
    "quantization_config",
    "compression_config",
    "attn_logit_softcapping",
    "query_pre_attn_scalar",
    "residual_multiplier",
    "attention_multiplier",
    "attention_chunk_size",
    "dual_chunk_attention_config",
    "no_rope_layers",
)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_whole(name: str, value: object, most: int = MAX_SIZE) -> None:
    if not _is_whole(value):
        raise _config_error(name, "a whole number", value)
    if value > most:  # type: ignore[operator]
        raise _config_error(name, f"at most {most}", value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _fields_in(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The fields of an object within the config; none if it is not there."""
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise _config_error(name, "an object", value)
    return value or {}


def _config_error(name: str, expected: object, got: object) -> ValueError:
    return ValueError(f"drafter config: {name}: expected {expected}, got {got}")


def _architecture(architectures: Any, merged: Mapping[str, Any]) -> str:
    """The one place that decides between the two versions."""
    if architectures is None:
        return "DFlash2DraftModel" if any(merged.get(name) for name in _DFLASH2_FIELDS) else "DFlashDraftModel"
    for name in ("DFlashDraftModel", "DFlash2DraftModel"):
        if architectures == [name]:
            return name
    raise _config_error("architectures", "['DFlash2DraftModel'] or ['DFlashDraftModel']", architectures)


def _layer_types(config: Mapping[str, Any], layers: int) -> tuple[tuple[str, ...], int | None]:
    """Each layer's kind of attention and the window of sliding ones, with the defaults of Hugging Face's Qwen3Config."""
    use_window, window = config.get("use_sliding_window", False), config.get("sliding_window", 4096)
    if not isinstance(use_window, bool):
        raise _config_error("use_sliding_window", "true or false", use_window)
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 28)
        _check_whole("max_window_layers", first)
        slides = use_window and window is not None
        kinds = ["sliding_attention" if slides and layer >= first else "full_attention" for layer in range(layers)]
    known = isinstance(kinds, (list, tuple)) and all(kind in ("sliding_attention", "full_attention") for kind in kinds)
    if not known or len(kinds) != layers:
        raise _config_error("layer_types", f"{layers} times sliding_attention or full_attention", kinds)
    if "sliding_attention" not in kinds:
        return tuple(kinds), None
    if not use_window:
        raise _config_error("use_sliding_window", "true, as layer_types has sliding_attention", use_window)
    if window is None:
        raise _config_error("sliding_window", "a value, as layer_types has sliding_attention", "none")
    return tuple(kinds), window


_ROPE_NUMBERS = {  # the fields of a kind of RoPE, besides its theta
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
}


def _rope(config: Mapping[str, Any]) -> Rope:
    places = {name: _fields_in(config, name) for name in ("rope_scaling", "rope_parameters")}
    merged: dict[str, Any] = {}
    where: dict[str, str] = {}
    for place, fields_there in places.items():
        for name, value in fields_there.items():
            if value is None:
                continue
            name = "rope_type" if name == "type" else name
            if name in merged and merged[name] != value:
                raise _config_error(f"{place}.{name}", f"that of {where[name].split('.')[0]}, {merged[name]}", value)
            merged[name], where[name] = value, f"{place}.{name}"

    kind = merged.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in _ROPE_NUMBERS:
        raise _config_error(where["rope_type"], "default, linear or yarn", kind)
    others = ("original_max_position_embeddings", "truncate") if kind == "yarn" else ()
    for name, value in merged.items():
        if name in ("rope_type", "rope_theta", *_ROPE_NUMBERS[kind], *others) or (name, value) == (
            "partial_rotary_factor",
            1.0,
        ):
            continue
        raise _config_error(where[name], f"nothing but what {kind} RoPE has", value)

    theta = merged.get("rope_theta") or config.get("rope_theta") or 10000.0
    numbers = {name: merged[name] for name in _ROPE_NUMBERS[kind] if merged.get(name) is not None}
    for name, value in {"rope_theta": theta, **numbers}.items():
        if not _is_number(value) or value <= 0:
            raise _config_error(where.get(name, name), "a finite number above 0", value)
    if kind == "default":
        return Rope(kind, float(theta))
    if numbers.get("factor", 0) < 1:
        raise _config_error(
            where.get("factor", f"{where['rope_type'].split('.')[0]}.factor"), "at least 1", merged.get("factor")
        )
    if kind == "linear":
        return Rope(kind, float(theta), float(numbers["factor"]))

    factor, fast, slow = numbers["factor"], numbers.get("beta_fast", 32.0), numbers.get("beta_slow", 1.0)
    length = config.get("original_max_position_embeddings") or merged.get("original_max_position_embeddings")
    length = length or config.get("max_position_embeddings", 32768)
    for name, value, fits, expected in (
        ("original_max_position_embeddings", length, _is_whole(length) and length > 0, "a whole number above 0"),
        ("truncate", merged.get("truncate"), merged.get("truncate") in (True, False, None), "true or false"),
        ("beta_slow", slow, slow <= fast, f"at most beta_fast = {fast}"),
        ("rope_theta", theta, theta > 1, "above 1"),
    ):
        if not fits:
            raise _config_error(where.get(name, name), expected, value)

    def sharpening(scale: float) -> float:
        return 1.0 + 0.1 * scale * math.log(factor)

    attention_factor = numbers.get("attention_factor")
    if attention_factor is None and "mscale" in numbers and "mscale_all_dim" in numbers:
        attention_factor = sharpening(numbers["mscale"]) / sharpening(numbers["mscale_all_dim"])
    if attention_factor is None:
        attention_factor = sharpening(1.0)
    truncate = merged.get("truncate", True)
    return Rope(kind, float(theta), float(factor), float(attention_factor), float(fast), float(slow), length, bool(truncate))


def _evenly_spaced(target_layers: int, draft_layers: int) -> list[int]:
    """Where a drafter taps its target if its config does not say."""
    if draft_layers == 1:
        return [target_layers // 2]
    first, last = 1, target_layers - 3
    return [round(first + i * (last - first) / (draft_layers - 1)) for i in range(draft_layers)]


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """RoPE on x [B, tokens, heads, D]: element i turns together with element i + D / 2."""
    cos, signed_sin = rotation
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


class Attention(nn.Module):
    """A block's rows attend to the ring and to each other."""

    def __init__(self, config: DraftConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = head_dim = config.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(hidden, self.heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * head_dim, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)

    def keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Of the block's rows or of context features [B, tokens, hidden]: each [B, tokens, Hk, D]."""
        keys = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        values = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        return rotate(self.k_norm(keys), rotation), values

    def forward(self, x: Tensor, rotation: Rotation, cache: RingKVCache, mask: Tensor) -> Tensor:
        """mask [B, 1, H / Hk * R, columns], one for all key/value heads; what is packed beyond its columns is empty."""
        lanes, rows, _ = x.shape
        queries = self.q_proj(x).view(lanes, rows, self.heads, self.head_dim)
        queries = rotate(self.q_norm(queries), rotation)
        queries, keys, values = cache.pack(self.layer, queries, *self.keys_values(x, rotation))
        # The query heads that share a key/value head are neighbours: as rows of one head they need no copy of the keys.
        grouped, columns = (lanes, self.kv_heads, self.heads // self.kv_heads * rows), mask.shape[-1]
        out = F.scaled_dot_product_attention(queries.view(*grouped, -1), keys[:, :, :columns], values[:, :, :columns], mask)
        out = out.view(lanes, self.heads, rows, self.head_dim).transpose(1, 2).flatten(2)
        return self.o_proj(out.to(x.dtype))


class MLP(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class GroupedDynamicConv(nn.Module):
    """Mixes each row with the rows before it in the block, before and after what it wraps: attention or MLP.

    A row's weights are learnt ones for each channel plus ones computed from the row itself for each group of channels.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.taps, self.groups = config.conv_kernel_size, config.hidden_size // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.taps * self.groups, bias=False)

    def kernels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """For rows [B, R, hidden], the weights before and after, each [B, R, taps, hidden]."""
        dynamic = self.kernel_projection(x).view(*x.shape[:2], 2, self.taps, self.groups, 1)
        before, after = (self.base_kernel.unflatten(-1, (self.groups, -1)) + dynamic).flatten(-2).unbind(2)
        return before, after

    def mix(self, x: Tensor, kernel: Tensor) -> Tensor:
        out = x * kernel[:, :, 0]
        for tap in range(1, self.taps):  # the first rows have nothing before them
            out[:, tap:].addcmul_(x[:, :-tap], kernel[:, tap:, tap])
        return out

    def forward(self, x: Tensor, wrapped: Callable[[Tensor], Tensor]) -> Tensor:
        before, after = self.kernels(x)
        return self.mix(wrapped(self.mix(x, before)), after)


class Layer(nn.Module):
    def __init__(self, config: DraftConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention_conv = GroupedDynamicConv(config) if config.conv_kernel_size else _just
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp_conv = GroupedDynamicConv(config) if config.conv_kernel_size else _just
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, rotation: Rotation, cache: RingKVCache, mask: Tensor) -> Tensor:
        attention = lambda x: self.self_attn(x, rotation, cache, mask)  # noqa: E731
        hidden = hidden + self.attention_conv(self.input_layernorm(hidden), attention)
        return hidden + self.mlp_conv(self.post_attention_layernorm(hidden), self.mlp)


def _just(x: Tensor, wrapped: Callable[[Tensor], Tensor]) -> Tensor:
    """In place of a convolution where there is none."""
    return wrapped(x)


class CandidateSelector(nn.Module):
    """Picks each row's token among its likeliest ones, by how well it follows the token picked before it."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(self, hidden: Tensor, logits: Tensor, anchor_ids: Tensor) -> Tensor:
        """hidden [B, N, hidden], logits [B, N, vocabulary], anchor_ids [B]: token ids [B, N]."""
        scores, candidates = self.scores(hidden, logits, anchor_ids)
        choices = scores.argmax(-1)  # [B, N, K before]
        path = [choices[:, 0, :1]]
        for row in range(1, choices.shape[1]):
            path.append(choices[:, row].gather(1, path[-1]))
        return candidates.gather(2, torch.stack(path, 1)).squeeze(2)

    def sample(self, hidden: Tensor, logits: Tensor, anchor_ids: Tensor, sampling: Sampling) -> Drafts:
        """Draws each row's token from its candidates: the softmax of their scores, after the token drawn before it."""
        scores, candidates = self.scores(hidden, logits, anchor_ids)
        after_each = (scores.float() / sampling.temperature).softmax(-1)  # [B, N, K before, K]
        picked, path, probabilities = anchor_ids.new_zeros(anchor_ids.shape), [], []
        for row in range(candidates.shape[1]):
            before = picked[:, None, None].expand(-1, 1, self.top_k)
            probabilities.append(after_each[:, row].gather(1, before).squeeze(1))
            picked = sampling.draw(probabilities[-1])
            path.append(picked)
        token_ids = candidates.gather(2, torch.stack(path, 1)[..., None]).squeeze(2)
        return Drafts(token_ids, torch.stack(probabilities, 1), candidates)

    def scores(self, hidden: Tensor, logits: Tensor, anchor_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Of every row's candidates after each token that may come before it, all at once; then only the path is left to
        follow. Returns scores [B, N, K before, K] (all K before the first row are the anchor) and candidates [B, N, K].
        """
        unary, candidates = logits.topk(self.top_k, sorted=False)  # [B, N, K]
        successors = F.embedding(candidates, self.successor_codebook) * self.hidden_projection(hidden)[:, :, None]
        before_first = anchor_ids[:, None, None].expand(-1, 1, self.top_k)
        predecessors = F.embedding(torch.cat([before_first, candidates[:, :-1]], 1), self.predecessor_codebook)
        return unary[:, :, None] + predecessors @ successors.transpose(2, 3), candidates


class DFlashDraftModel(nn.Module):
    """A DFlash drafter on `torch.ops.dflash2`. For inference: its methods compute no gradients."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        if config.architecture != type(self).__name__:
            raise _config_error("architectures", f"['{type(self).__name__}']", f"['{config.architecture}']")
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        layers = [Layer(config, layer) for layer in range(config.num_hidden_layers)]
        self.layers: Sequence[Layer] = nn.ModuleList(layers)  # type: ignore[assignment]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rope_frequencies: Tensor
        self.register_buffer("rope_frequencies", config.rope.frequencies(config.head_dim), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "DFlashDraftModel":
        super()._apply(fn, recurse)
        # A change of dtype must not reach these: in bfloat16 positions past a few hundred run into each other.
        frequencies = self.config.rope.frequencies(self.config.head_dim)
        self.rope_frequencies = frequencies.to(self.norm.weight.device)
        return self

    @staticmethod
    def from_pretrained(
        source: str | pathlib.Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        revision: str | None = None,
    ) -> "DFlashDraftModel":
        """Loads a published drafter: a DFlashDraftModel or DFlash2DraftModel, whichever its config asks for.

        source: a folder with `config.json` and `model.safetensors`, or shards with `model.safetensors.index.json`; or the
        `owner/name` of a model on the Hugging Face hub, at `revision` if given. dtype: of the weights, as stored if left
        out. device: the CPU if left out. Raises ValueError naming each config field that is not supported and each tensor
        that is missing, unexpected or of the wrong shape.
        """
        folder = _folder_of(source, revision)
        config = DraftConfig.from_json(folder / "config.json")
        weights = _read_weights(folder)
        with torch.device("meta"):
            model = _CLASSES[config.architecture](config)
        model.load_published(weights)
        return model.to(device=device or "cpu", dtype=dtype or model.fc.weight.dtype).eval()

    def load_published(self, weights: Mapping[str, Tensor]) -> None:
        """Takes over a state dict with the published names: every one, and nothing else."""
        # Codebooks are stored as tensors or as the weights of an embedding.
        codebooks = [f"candidate_selector.{end}_codebook" for end in ("predecessor", "successor")]
        rename = {f"{name}.weight": name for name in codebooks}
        weights = {rename.get(name, name): tensor for name, tensor in weights.items()}
        expected = self.state_dict()
        faults = [f"missing {name}" for name in expected if name not in weights]
        faults += [f"unexpected {name}" for name in weights if name not in expected]
        faults += [
            f"{name}: expected floats of shape {list(expected[name].shape)}, got {tensor.dtype} {list(tensor.shape)}"
            for name, tensor in weights.items()
            if name in expected and (tensor.shape != expected[name].shape or not tensor.is_floating_point())
        ]
        if faults:
            raise ValueError("drafter weights do not fit the config: " + "; ".join(faults))
        self.load_state_dict(weights, assign=True)

    @property
    def block_size(self) -> int:
        """Rows of a block as trained, the anchor included."""
        return self.config.block_size

    @property
    def mask_token_id(self) -> int:
        return self.config.mask_token_id

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """The target's layers, from 0, whose outputs the drafter sees: Hugging Face's `hidden_states[id + 1]`."""
        return self.config.target_layer_ids

    @property
    def window(self) -> int | None:
        """Of sliding layers, in tokens; None if all layers attend to everything."""
        return self.config.sliding_window

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    def make_cache(self, lanes: int = 1) -> RingKVCache:
        """An empty cache for 1..4 sequences, on the model's device."""
        c = self.config
        return RingKVCache(c.num_hidden_layers, lanes, c.num_key_value_heads, c.windows, c.head_dim, device=self.device)

    # ---- what the drafter knows of the text: the target's hidden states, as context

    @torch.no_grad()
    def context_features(self, hidden_states: Tensor | Sequence[Tensor]) -> Tensor:
        """What the drafter keeps of N tokens that the target has read, [B, N, hidden].

        hidden_states: the target's, as a Hugging Face model returns them (embeddings first, then each layer's output,
        each [B, N, hidden]); or the tapped ones alone, joined in their last dimension [B, N, taps * hidden].
        """
        if not isinstance(hidden_states, Tensor):
            needed = max(self.target_layer_ids) + 2
            if len(hidden_states) < needed:
                raise ValueError(
                    f"context_features: hidden_states: expected at least {needed}, the embeddings and each layer's "
                    f"output, got {len(hidden_states)}"
                )
            hidden_states = torch.cat([hidden_states[i + 1] for i in self.target_layer_ids], dim=-1)
        _check_shape("context_features", "hidden_states", hidden_states, (None, None, self.fc.in_features))
        return self.hidden_norm(self.fc(hidden_states.to(self.dtype)))

    @torch.no_grad()
    def prefill_context(self, cache: RingKVCache, features: Tensor, lengths: Tensor | None = None) -> None:
        """Commits a prompt's features [B, N, hidden], any N >= 0, of which each lane's last `window` cost sliding layers work.

        lengths: int32 [B] on the device, tokens of each lane, clamped to 0..N; N for all if left out.
        """
        self._check_cache("prefill_context", cache)
        _check_shape("prefill_context", "features", features, (cache.lanes, None, self.config.hidden_size))
        tokens = features.shape[1]
        last: dict[int, tuple[Tensor, Rotation]] = {}  # each lane's last so many tokens
        for index, layer in enumerate(self.layers):
            kept = cache.kept(index, tokens)
            if kept not in last:
                last[kept] = self._last_features(cache, features, lengths, kept)
            keys, values = layer.self_attn.keys_values(*last[kept])
            cache.prefill(index, keys, values, lengths, tokens=tokens)
        cache.advance(lengths)

    def _last_features(
        self, cache: RingKVCache, features: Tensor, lengths: Tensor | None, kept: int
    ) -> tuple[Tensor, Rotation]:
        tokens = features.shape[1]
        first = torch.zeros_like(cache.token_counts)
        if tokens > kept:
            if lengths is None:
                first = first + (tokens - kept)
            else:
                first = (lengths.clamp(0, tokens) - kept).clamp(min=0)
            lane = torch.arange(cache.lanes, device=self.device)[:, None]
            features = features[lane, first[:, None] + torch.arange(kept, device=self.device)]
        return features, self.rotation(cache.token_counts + first, kept)

    @torch.no_grad()
    def commit_context(self, cache: RingKVCache, features: Tensor, counts: Tensor) -> None:
        """Commits the first `counts` of each lane's features [B, C, hidden], C in 1..16, and ends the round.

        counts: int32 [B] on the device: how many of the C tokens are certain; below 0 means 0, above C means C.
        """
        self._check_cache("commit_context", cache)
        _check_shape("commit_context", "features", features, (cache.lanes, None, self.config.hidden_size))
        rotation = self.rotation(cache.token_counts, features.shape[1])
        for index, layer in enumerate(self.layers):
            keys, values = layer.self_attn.keys_values(features, rotation)
            cache.commit(index, keys, values, counts)
        cache.advance(counts)

    # ---- a round

    @torch.no_grad()
    def embed_block(self, embedding: Tensor | nn.Embedding, anchor_ids: Tensor, rows: int | None = None) -> Tensor:
        """A block's input [B, rows, hidden]: the anchors' embeddings, then the mask token's.

        embedding: the target's input embedding or its weight [vocabulary, hidden]. anchor_ids: token ids [B].
        rows: 2..16, `block_size` if left out.
        """
        rows = self.block_size if rows is None else rows
        if not _is_whole(rows) or not 2 <= rows <= MAX_ROWS:
            raise ValueError(f"embed_block: rows: expected 2..{MAX_ROWS}, got {rows!r}")
        _check_shape("embed_block", "anchor_ids", anchor_ids, (None,))
        weight = embedding.weight if isinstance(embedding, nn.Embedding) else embedding
        ids = F.pad(anchor_ids[:, None], (0, rows - 1), value=self.mask_token_id)
        hidden = F.embedding(ids, weight)
        return hidden if self.config.input_embedding_scale == 1.0 else hidden * self.config.input_embedding_scale

    @torch.no_grad()
    def forward(self, block_embeddings: Tensor, cache: RingKVCache) -> Tensor:
        """One drafting round: a block's input [B, R, hidden] to its output [B, R, hidden], 2 <= R <= 16, R below any window.

        Row j stands at position cache.token_counts + j. The cache is read and not written.
        """
        self._check_cache("forward", cache)
        _check_shape("forward", "block_embeddings", block_embeddings, (cache.lanes, None, self.config.hidden_size))
        hidden = block_embeddings.to(self.dtype)
        lanes, rows, _ = hidden.shape
        rotation = self.rotation(cache.token_counts, rows)
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        masks: dict[tuple[int | None, bool], Tensor] = {}  # one for all layers of a kind
        for index, layer in enumerate(self.layers):
            kind = self.config.windows[index], self.config.causal[index]
            if kind not in masks:
                mask = cache.mask(group, rows, layer=index, causal=kind[1]).view(lanes, 1, group * rows, -1)
                if not torch.compiler.is_compiling():  # compiled, every other length would be another graph
                    mask = mask[..., : rows + -(-cache.longest // GRANULE) * GRANULE]
                masks[kind] = mask
            hidden = layer(hidden, rotation, cache, masks[kind])
        return self.norm(hidden)

    @torch.no_grad()
    def logits(self, hidden: Tensor, output_head: nn.Module) -> Tensor:
        """The target's output head on the drafter's output [B, N, hidden]: [B, N, vocabulary]."""
        weight = getattr(output_head, "weight", hidden)
        logits = output_head(hidden.to(weight.dtype))[..., : self.config.vocab_size]  # a head may be padded
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return torch.tanh(logits / cap) * cap if cap > 0 else logits

    @torch.no_grad()
    def propose(self, hidden: Tensor, anchor_ids: Tensor, output_head: nn.Module) -> Tensor:
        """The likeliest draft token ids [B, R - 1], from rows 1.. of the output [B, R - 1, hidden] and the anchors' ids [B]."""
        self._check_output("propose", hidden, anchor_ids)
        return self.logits(hidden, output_head).argmax(-1)

    @torch.no_grad()
    def sample(self, hidden: Tensor, anchor_ids: Tensor, output_head: nn.Module, sampling: Sampling) -> Drafts:
        """Draft token ids drawn at random, with the arguments of `propose`, and the probabilities they were drawn with.

        Drawn from `sampling.probabilities` of the logits.
        """
        self._check_output("sample", hidden, anchor_ids)
        probabilities = sampling.probabilities(self.logits(hidden, output_head))
        return Drafts(sampling.draw(probabilities), probabilities)

    def rotation(self, first_positions: Tensor, tokens: int) -> Rotation:
        """RoPE's cosines and signed sines, each [B, tokens, 1, D], for positions first_positions [B] and on."""
        positions = first_positions[:, None] + torch.arange(tokens, device=first_positions.device)
        angles = positions[:, :, None, None] * self.rope_frequencies
        scale = self.config.rope.attention_factor
        cos, sin = (angles.cos() * scale).to(self.dtype), (angles.sin() * scale).to(self.dtype)
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)

    def _check_output(self, call: str, hidden: Tensor, anchor_ids: Tensor) -> None:
        _check_shape(call, "hidden", hidden, (None, None, self.config.hidden_size))
        _check_shape(call, "anchor_ids", anchor_ids, (hidden.shape[0],))

    def _check_cache(self, call: str, cache: RingKVCache) -> None:
        c = self.config
        expected = (c.num_hidden_layers, c.num_key_value_heads, c.windows, c.head_dim, self.device)
        got = (cache.layers, cache.kv_heads, cache.windows, cache.head_dim, cache.device)
        if got != expected:
            raise ValueError(
                f"{call}: cache: expected layers, kv_heads, windows, head_dim, device = {expected}, got {got}; "
                "make_cache makes one that fits"
            )


class DFlash2DraftModel(DFlashDraftModel):
    """A DFlash 2 drafter: with convolutions within the block, and a selector that picks each token by the one before it."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)

    @torch.no_grad()
    def propose(self, hidden: Tensor, anchor_ids: Tensor, output_head: nn.Module) -> Tensor:
        """Draft token ids [B, R - 1], from rows 1.. of the output [B, R - 1, hidden] and the anchors' ids [B]."""
        self._check_output("propose", hidden, anchor_ids)
        return self.candidate_selector(hidden, self.logits(hidden, output_head), anchor_ids)

    @torch.no_grad()
    def sample(self, hidden: Tensor, anchor_ids: Tensor, output_head: nn.Module, sampling: Sampling) -> Drafts:
        """Draft token ids drawn at random, with the arguments of `propose`, and the probabilities they were drawn with.

        Drawn along the selector's path, from the `selector_top_k` candidates of each row: of `sampling` only temperature
        and generator matter.
        """
        self._check_output("sample", hidden, anchor_ids)
        return self.candidate_selector.sample(hidden, self.logits(hidden, output_head), anchor_ids, sampling)


_CLASSES = {model.__name__: model for model in (DFlashDraftModel, DFlash2DraftModel)}


# ---- files


def _folder_of(source: str | pathlib.Path, revision: str | None) -> pathlib.Path:
    folder = pathlib.Path(source)
    if not folder.is_dir() and isinstance(source, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        folder = _download(source, revision)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"drafter folder: expected a file {folder / 'config.json'}, found none")
    return folder


def _download(name: str, revision: str | None) -> pathlib.Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ImportError(
            f"{name} is no folder here, and loading from the Hugging Face hub needs huggingface_hub: "
            "pip install 'torch_dflash2[hub]'"
        ) from error
    wanted = ["config.json", "*.safetensors", "*.safetensors.index.json"]
    try:
        return pathlib.Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except (OSError, ValueError) as error:  # what the hub client raises is one of these
        raise FileNotFoundError(f"{name} is no folder here, and the Hugging Face hub gave none: {error}") from error


def _read_weights(folder: pathlib.Path) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise ImportError("loading a drafter needs safetensors: pip install 'torch_dflash2[drafter]'") from error
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file() or not index.is_file():
        shards = ["model.safetensors"]
    else:
        shards = _shards(index)
    weights: dict[str, Tensor] = {}
    for shard in shards:
        if pathlib.PurePath(shard).name != shard or not (folder / shard).is_file():
            raise FileNotFoundError(f"drafter folder: expected a file {folder / shard}, found none")
        for name, tensor in load_file(folder / shard).items():
            if name in weights:
                raise ValueError(f"drafter weights: expected {name} in one shard, found it in {shard} too")
            weights[name] = tensor
    return weights


def _shards(index: pathlib.Path) -> list[str]:
    content = json.loads(index.read_text(encoding="utf-8"))
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict) or not shards or not all(isinstance(shard, str) for shard in shards.values()):
        raise ValueError(f"drafter folder: expected {index} to name the file of each weight in weight_map, it does not")
    return sorted(set(shards.values()))


def _check_shape(call: str, name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    sizes_fit = all(want in (None, got) for want, got in zip(shape, tensor.shape, strict=False))
    if tensor.dim() != len(shape) or not sizes_fit:
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{call}: {name}: expected shape [{expected}], got {list(tensor.shape)}")
