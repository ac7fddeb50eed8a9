"""The DFlash 2 drafter: a small transformer that drafts a block of tokens at once from a target model's hidden states.

Read it from top to bottom: the configuration, the parts of a layer, a layer, the model. One drafting round is

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import RingKVCache

Rotation = tuple[Tensor, Tensor]  # cosines and signed sines, [B, tokens, 1, D]


@dataclass(frozen=True)
class DraftConfig:
    """A drafter's geometry. Made by `from_dict` or `from_json`, which refuse what this package does not do."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    sliding_window: int
    rms_norm_eps: float
    rope_theta: float
    attention_bias: bool
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # of the target's layers whose outputs are tapped, from 0
    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float  # 0: none

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in (int, "int") and not _is_whole(value):
                raise _config_error(field.name, "a whole number", value)
            if field.type in (bool, "bool") and not isinstance(value, bool):
                raise _config_error(field.name, "true or false", value)
            if field.type in (float, "float") and not math.isfinite(value):
                raise _config_error(field.name, "a finite number", value)
        if not all(_is_whole(layer) for layer in self.target_layer_ids):
            raise _config_error("target_layer_ids", "whole numbers", list(self.target_layer_ids))
        top = max(self.target_layer_ids, default=-1)
        for name, fits, expected in (
            ("hidden_size", self.hidden_size >= 1, "at least 1"),
            ("num_hidden_layers", self.num_hidden_layers >= 1, "at least 1"),
            ("num_key_value_heads", self.num_key_value_heads >= 1, "at least 1"),
            (
                "num_attention_heads",
                self.num_attention_heads >= 1 and self.num_attention_heads % max(1, self.num_key_value_heads) == 0,
                f"a multiple of num_key_value_heads = {self.num_key_value_heads}",
            ),
            ("head_dim", self.head_dim in (128, 256), "128 or 256"),
            ("block_size", 2 <= self.block_size <= 16, "2..16"),
            ("rms_norm_eps", self.rms_norm_eps > 0, "above 0"),
            ("rope_theta", self.rope_theta > 0, "above 0"),
            ("sliding_window", self.sliding_window > self.block_size, f"more than block_size = {self.block_size}"),
            ("mask_token_id", self.mask_token_id < self.vocab_size, f"below vocab_size = {self.vocab_size}"),
            ("target_layer_ids", top >= 0 and min(self.target_layer_ids) >= 0, "one or more layer numbers from 0"),
            ("conv_kernel_size", self.conv_kernel_size >= 1, "at least 1"),
            (
                "conv_group_size",
                self.conv_group_size >= 1 and self.hidden_size % self.conv_group_size == 0,
                f"a divisor of hidden_size = {self.hidden_size}",
            ),
            ("selector_rank", self.selector_rank >= 1, "at least 1"),
            ("selector_top_k", 1 <= self.selector_top_k <= self.vocab_size, f"1..vocab_size = {self.vocab_size}"),
        ):
            if not fits:
                raise _config_error(name, expected, getattr(self, name))

    @classmethod
    def from_json(cls, path: str | pathlib.Path) -> "DraftConfig":
        """Reads a published `config.json`."""
        return cls.from_dict(json.loads(pathlib.Path(path).read_text()))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "DraftConfig":
        """Reads the fields of a published `config.json`; raises ValueError naming the field that is not supported."""
        draft = config.get("dflash_config") or {}
        for name in draft:
            if name not in _DRAFT_FIELDS:
                raise _config_error(f"dflash_config.{name}", f"one of {', '.join(_DRAFT_FIELDS)}", name)
        merged = {**config, **draft}

        def required(name: str) -> Any:
            if merged.get(name) is None:
                raise _config_error(name, "a value", "none")
            return merged[name]

        def optional(name: str, default: Any) -> Any:
            value = merged.get(name)
            return default if value is None else value

        # What would change the arithmetic is refused, never ignored.
        layers = required("num_hidden_layers")
        if not _is_whole(layers):
            raise _config_error("num_hidden_layers", "a whole number", layers)
        layer_types = config.get("layer_types")
        if layer_types is None and config.get("use_sliding_window") and config.get("max_window_layers") == 0:
            layer_types = ["sliding_attention"] * layers
        if layer_types != ["sliding_attention"] * layers:
            raise _config_error("layer_types", "sliding_attention for every layer", layer_types)
        for name, expected, default in (
            ("architectures", ["DFlash2DraftModel"], ["DFlash2DraftModel"]),
            ("is_causal", False, None),
            ("use_sliding_window", True, True),
            ("hidden_act", "silu", "silu"),
            ("quantization_config", None, None),
            ("partial_rotary_factor", 1.0, 1.0),
            *((name, None, None) for name in _SCALINGS),
        ):
            got = config.get(name, default)
            if got != expected:
                raise _config_error(name, expected, got)
        for name in config:
            if "sink" in name and config[name]:
                raise _config_error(name, "no attention sinks", config[name])
        heads = required("num_attention_heads")
        taps = merged.get("target_layer_ids")
        if taps is not None and not isinstance(taps, (list, tuple)):
            raise _config_error("target_layer_ids", "a list of layer numbers", taps)
        if taps is None:
            taps = _evenly_spaced(required("num_target_layers"), layers)
        return cls(
            hidden_size=required("hidden_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=optional("num_key_value_heads", heads),
            head_dim=optional("head_dim", 128),
            intermediate_size=required("intermediate_size"),
            vocab_size=required("vocab_size"),
            sliding_window=required("sliding_window"),
            rms_norm_eps=float(optional("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(config),
            attention_bias=optional("attention_bias", False),
            block_size=optional("block_size", 16),
            mask_token_id=required("mask_token_id"),
            target_layer_ids=tuple(taps),
            conv_kernel_size=required("conv_kernel_size"),
            conv_group_size=required("conv_group_size"),
            selector_rank=required("selector_rank"),
            selector_top_k=required("selector_top_k"),
            input_embedding_scale=float(optional("input_embedding_scale", 1.0)),
            output_multiplier=float(optional("output_multiplier", 1.0)),
            final_logit_softcapping=max(0.0, float(optional("final_logit_softcapping", 0.0))),
        )


# The fields that a config keeps in its `dflash_config`, or else at its top level.
_DRAFT_FIELDS = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
)


# What other model families scale and this one does not.
_SCALINGS = ("attn_logit_softcapping", "query_pre_attn_scalar", "residual_multiplier", "attention_multiplier")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _config_error(name: str, expected: object, got: object) -> ValueError:
    return ValueError(f"drafter config: {name}: expected {expected}, got {got}")


def _rope_theta(config: Mapping[str, Any]) -> float:
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name) or {}
        for key, value in rope.items():
            if key in ("rope_type", "type"):
                if value != "default":
                    raise _config_error(f"{name}.{key}", "default", value)
            elif key != "rope_theta" and not (key == "partial_rotary_factor" and value == 1.0):
                raise _config_error(f"{name}.{key}", "plain RoPE", value)
    thetas = [(config.get(name) or {}).get("rope_theta") for name in ("rope_scaling", "rope_parameters")]
    if None not in thetas and thetas[0] != thetas[1]:
        raise _config_error("rope_parameters.rope_theta", f"that of rope_scaling, {thetas[0]}", thetas[1])
    return float(thetas[0] or thetas[1] or config.get("rope_theta") or 10000.0)


def _evenly_spaced(target_layers: int, draft_layers: int) -> list[int]:
    """Where a drafter taps its target if its config does not say."""
    if draft_layers == 1:
        return [target_layers // 2]
    first, last = 1, target_layers - 3
    return [round(first + i * (last - first) / (draft_layers - 1)) for i in range(draft_layers)]


def rope_frequencies(head_dim: int, theta: float) -> Tensor:
    """Radians a position for each pair of RoPE, float32 [head_dim / 2]."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """RoPE on x [B, tokens, heads, D]: element i turns together with element i + D / 2."""
    cos, signed_sin = rotation
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


class Attention(nn.Module):
    """A block's rows attend to the ring and, in both directions, to each other."""

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

    def forward(self, x: Tensor, rotation: Rotation, cache: RingKVCache) -> Tensor:
        lanes, rows, _ = x.shape
        queries = self.q_proj(x).view(lanes, rows, self.heads, self.head_dim)
        queries = rotate(self.q_norm(queries), rotation)
        queries, keys, values = cache.pack(self.layer, queries, *self.keys_values(x, rotation))
        mask = cache.mask(self.heads, rows)
        # The query heads that share a key/value head are neighbours: as rows of one head they need no copy of the keys.
        grouped = (lanes, self.kv_heads, self.heads // self.kv_heads * rows)
        out = F.scaled_dot_product_attention(queries.view(*grouped, -1), keys, values, mask.view(*grouped, -1))
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


class Layer(nn.Module):
    def __init__(self, config: DraftConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention_conv = GroupedDynamicConv(config)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp_conv = GroupedDynamicConv(config)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, rotation: Rotation, cache: RingKVCache) -> Tensor:
        x = self.input_layernorm(hidden)
        before, after = self.attention_conv.kernels(x)
        x = self.self_attn(self.attention_conv.mix(x, before), rotation, cache)
        hidden = hidden + self.attention_conv.mix(x, after)
        x = self.post_attention_layernorm(hidden)
        before, after = self.mlp_conv.kernels(x)
        x = self.mlp(self.mlp_conv.mix(x, before))
        return hidden + self.mlp_conv.mix(x, after)


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
        scores, candidates = logits.topk(self.top_k, sorted=False)  # [B, N, K]
        successors = F.embedding(candidates, self.successor_codebook) * self.hidden_projection(hidden)[:, :, None]
        # Every row's choice for each token that may come before it, all at once; then only the path is left to follow.
        before_first = anchor_ids[:, None, None].expand(-1, 1, self.top_k)
        predecessors = F.embedding(torch.cat([before_first, candidates[:, :-1]], 1), self.predecessor_codebook)
        choices = (scores[:, :, None] + predecessors @ successors.transpose(2, 3)).argmax(-1)  # [B, N, K before]
        path = [choices[:, 0, :1]]
        for row in range(1, choices.shape[1]):
            path.append(choices[:, row].gather(1, path[-1]))
        return candidates.gather(2, torch.stack(path, 1)).squeeze(2)


class DFlash2DraftModel(nn.Module):
    """A DFlash 2 drafter on `torch.ops.dflash2`. For inference: its methods compute no gradients."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        layers = [Layer(config, layer) for layer in range(config.num_hidden_layers)]
        self.layers: Sequence[Layer] = nn.ModuleList(layers)  # type: ignore[assignment]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.candidate_selector = CandidateSelector(config)
        self.rope_frequencies: Tensor
        self.register_buffer("rope_frequencies", rope_frequencies(config.head_dim, config.rope_theta), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "DFlash2DraftModel":
        super()._apply(fn, recurse)
        # A change of dtype must not reach these: in bfloat16 positions past a few hundred run into each other.
        frequencies = rope_frequencies(self.config.head_dim, self.config.rope_theta)
        self.rope_frequencies = frequencies.to(self.norm.weight.device)
        return self

    @classmethod
    def from_pretrained(
        cls,
        folder: str | pathlib.Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> "DFlash2DraftModel":
        """Loads a folder with `config.json` and `model.safetensors` as published for DFlash 2.

        dtype: of the weights, as stored if left out; device: the CPU if left out. Raises ValueError naming each config
        field that is not supported and each tensor that is missing, unexpected or of the wrong shape.
        """
        from safetensors.torch import load_file

        folder = pathlib.Path(folder)
        for name in ("config.json", "model.safetensors"):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"drafter folder: expected a file {folder / name}, found none")
        with torch.device("meta"):
            model = cls(DraftConfig.from_json(folder / "config.json"))
        model.load_published(load_file(folder / "model.safetensors"))
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
    def window(self) -> int:
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
        return RingKVCache(c.num_hidden_layers, lanes, c.num_key_value_heads, c.sliding_window, c.head_dim, device=self.device)

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
        """Commits a prompt's features [B, N, hidden], any N >= 0, of which the last `window` of each lane do any work.

        lengths: int32 [B] on the device, tokens of each lane, clamped to 0..N; N for all if left out.
        """
        self._check_cache("prefill_context", cache)
        _check_shape("prefill_context", "features", features, (cache.lanes, None, self.config.hidden_size))
        tokens = features.shape[1]
        first = torch.zeros_like(cache.token_counts)
        if tokens > self.window:
            if lengths is None:
                first = first + (tokens - self.window)
            else:
                first = (lengths.clamp(0, tokens) - self.window).clamp(min=0)
            lane = torch.arange(cache.lanes, device=self.device)[:, None]
            features = features[lane, first[:, None] + torch.arange(self.window, device=self.device)]
        rotation = self.rotation(cache.token_counts + first, features.shape[1])
        for index, layer in enumerate(self.layers):
            keys, values = layer.self_attn.keys_values(features, rotation)
            cache.prefill(index, keys, values, lengths, tokens=tokens)
        cache.advance(lengths)

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
        _check_shape("embed_block", "anchor_ids", anchor_ids, (None,))
        weight = embedding.weight if isinstance(embedding, nn.Embedding) else embedding
        ids = F.pad(anchor_ids[:, None], (0, (rows or self.block_size) - 1), value=self.mask_token_id)
        hidden = F.embedding(ids, weight)
        return hidden if self.config.input_embedding_scale == 1.0 else hidden * self.config.input_embedding_scale

    @torch.no_grad()
    def forward(self, block_embeddings: Tensor, cache: RingKVCache) -> Tensor:
        """One drafting round: a block's input [B, R, hidden] to its output [B, R, hidden], 2 <= R <= 16, R < window.

        Row j stands at position cache.token_counts + j. The cache is read and not written.
        """
        self._check_cache("forward", cache)
        _check_shape("forward", "block_embeddings", block_embeddings, (cache.lanes, None, self.config.hidden_size))
        hidden = block_embeddings.to(self.dtype)
        rotation = self.rotation(cache.token_counts, hidden.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, rotation, cache)
        return self.norm(hidden)

    @torch.no_grad()
    def logits(self, hidden: Tensor, output_head: nn.Module) -> Tensor:
        """The target's output head on the drafter's output [B, N, hidden]: [B, N, vocabulary]."""
        weight = getattr(output_head, "weight", hidden)
        logits = output_head(hidden.to(weight.dtype))
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return torch.tanh(logits / cap) * cap if cap else logits

    @torch.no_grad()
    def propose(self, hidden: Tensor, anchor_ids: Tensor, output_head: nn.Module) -> Tensor:
        """Draft token ids [B, R - 1], from rows 1.. of the output [B, R - 1, hidden] and the anchors' ids [B]."""
        _check_shape("propose", "hidden", hidden, (None, None, self.config.hidden_size))
        _check_shape("propose", "anchor_ids", anchor_ids, (hidden.shape[0],))
        return self.candidate_selector(hidden, self.logits(hidden, output_head), anchor_ids)

    def rotation(self, first_positions: Tensor, tokens: int) -> Rotation:
        """RoPE's cosines and signed sines, each [B, tokens, 1, D], for positions first_positions [B] and on."""
        positions = first_positions[:, None] + torch.arange(tokens, device=first_positions.device)
        angles = positions[:, :, None, None] * self.rope_frequencies
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)

    def _check_cache(self, call: str, cache: RingKVCache) -> None:
        c = self.config
        windows = (c.sliding_window,) * c.num_hidden_layers
        expected = (c.num_hidden_layers, c.num_key_value_heads, windows, c.head_dim, self.device)
        got = (cache.layers, cache.kv_heads, cache.windows, cache.head_dim, cache.device)
        if got != expected:
            raise ValueError(
                f"{call}: cache: expected layers, kv_heads, windows, head_dim, device = {expected}, got {got}; "
                "make_cache makes one that fits"
            )


def _check_shape(call: str, name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    sizes_fit = all(want in (None, got) for want, got in zip(shape, tensor.shape, strict=False))
    if tensor.dim() != len(shape) or not sizes_fit:
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{call}: {name}: expected shape [{expected}], got {list(tensor.shape)}")
