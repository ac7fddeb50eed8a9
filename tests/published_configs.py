"""The drafters that are published, as far as their authors describe them, and configs like theirs to load in a test.

`ROWS` holds what is published. A config needs more than that: the vocabulary, the mask token, the intermediate size, which
layers of the target are tapped, and for DFlash 2 the sizes of convolutions and selector. `config_json` fills these in with
numbers of our choice: they are not published ones, and nothing here says that a published checkpoint has them. The same
goes for what is None in a row.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    target: str
    version: int  # DFlash 1 or 2
    block_size: int | None
    layers: int | None
    attention: str | None  # sliding, full, or both
    hidden_size: int | None  # its target's
    heads: tuple[int, int] | None = None  # query and key/value heads, all of 128
    window: int | None = None
    multiplier_and_softcap: bool = False


ROWS = [
    Published("Qwen3.8-27B", 2, 8, 5, "sliding", 5120, (32, 8), 2048),
    Published("Muse-Glimmer-30B", 2, 16, None, None, 6656, multiplier_and_softcap=True),
    Published("GLM-5.3", 2, None, 6, None, 6144, (64, 8)),
    Published("GLM-5.3-Flash", 2, None, 5, None, 4096),
    Published("Qwen3.6-35B-A3B", 2, None, 6, None, 2048),
    Published("Qwen3-4B", 1, 16, None, "full", 2560),
    Published("Qwen3-8B", 1, 16, None, "full", 4096),
    Published("others", 1, None, 5, "4 sliding, 1 full", None),
]


def config_json(row: Published, *, scale: int = 64, vocabulary: int = 211) -> dict:
    """A config.json with the structure of a row; hidden size and window are `scale` times smaller."""
    layers = row.layers or 5  # 5 is ours, like every number below that is no row's
    full = {"full": layers, "4 sliding, 1 full": 1}.get(row.attention, 0)
    kinds = ["sliding_attention"] * (layers - full) + ["full_attention"] * full
    hidden_size = (row.hidden_size or 4096) // scale
    heads, kv_heads = row.heads or (32, 8)
    draft = {"block_size": row.block_size or 8, "mask_token_id": vocabulary - 1, "target_layer_ids": [1, 9, 17]}
    if row.multiplier_and_softcap:
        draft |= {"output_multiplier": 0.5, "final_logit_softcapping": 20.0}
    config = {
        "architectures": ["DFlash2DraftModel" if row.version == 2 else "DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "intermediate_size": 2 * hidden_size,
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "num_target_layers": 20,
        "dflash_config": draft,
    }
    if full < layers:
        config |= {
            "layer_types": kinds,
            "use_sliding_window": True,
            "sliding_window": (row.window or 2048) // scale,
            "max_window_layers": 0,
        }
    if row.version == 2:
        config["is_causal"] = False
        draft |= {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 8, "selector_top_k": 16}
    return config


def readme_row(row: Published) -> list[str]:
    """The row's cells in the README's table; a dash for what is not published."""

    def cell(value: object) -> str:
        return "—" if value is None else f"{value:,}" if isinstance(value, int) else str(value)

    heads = None if row.heads is None else f"{row.heads[0]}/{row.heads[1]}"
    extras = "output multiplier, logit softcap" if row.multiplier_and_softcap else ""
    version = "DFlash 2" if row.version == 2 else "DFlash"
    sizes = (row.block_size, row.layers, row.attention, row.window, row.hidden_size, heads)
    return [row.target, version, *map(cell, sizes), extras]
