"""What a drafting round costs after a short and after a long text, here and with PyPI dflash's model of the same weights.

A round is the draft side of a decoding step: commit the tokens that the target has just verified, then run the drafter
on a block. Both models are driven as in decoding: each round they are given the few new tokens and nothing else. The
target's part, output head included, is left out, as it would hide a difference. At each length all contenders run in
turns and are compared by their medians. Then our drafter runs after 2,048 and after 65,536 tokens in turns: exit status 1
if the long text costs more than 1.1 times the short one.

The drafter has random weights. Heads, head size, window and block are those of published drafters; hidden size, layers and
feed-forward are smaller, so that a CPU can run it.

    python benchmarks/drafting_round.py [--device mps] [--dtype bfloat16] [--json FILE] [--plot FILE.png]

--plot needs matplotlib. Without PyPI `dflash` only our drafter runs.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from torch_dflash2 import DFlash2DraftModel
from torch_dflash2.drafter import DraftConfig

try:
    import dflash.model as published
    from transformers import Qwen3Config
except ImportError:
    published = None

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
ALLOWED = 1.1  # times the cost at 2,048, for the longest text
ACCEPTED = 3  # tokens committed a round
BLOCK = 8
TAPS = 3
CONFIG = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 2048,
    "vocab_size": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "layer_types": ["sliding_attention"] * 2,
    "use_sliding_window": True,
    "sliding_window": 2048,
    "max_window_layers": 0,
    "max_position_embeddings": 131072,
    "is_causal": False,
    "num_target_layers": 36,
    "dflash_config": {
        "block_size": BLOCK,
        "mask_token_id": 3,
        "target_layer_ids": [1, 17, 33],
        "conv_kernel_size": 2,
        "conv_group_size": 32,
        "selector_rank": 16,
        "selector_top_k": 8,
    },
}
HIDDEN = CONFIG["hidden_size"]


class Ours:
    """Our drafter after a text of hidden states [1, N, taps * hidden]."""

    def __init__(self, drafter: DFlash2DraftModel, text: Tensor) -> None:
        self.drafter, self.cache = drafter, drafter.make_cache()
        self.counts = torch.tensor([ACCEPTED], dtype=torch.int32, device=drafter.device)
        drafter.prefill_context(self.cache, drafter.context_features(text))

    def round(self, verified: Tensor, block: Tensor) -> Tensor:
        """verified [1, R, taps * hidden], of which ACCEPTED are kept; block [1, R, hidden]."""
        self.drafter.commit_context(self.cache, self.drafter.context_features(verified), self.counts)
        return self.drafter(block, self.cache)


class Published:
    """PyPI dflash's model with its own cache, driven as its own generation loop drives it."""

    def __init__(self, model: torch.nn.Module, text: Tensor) -> None:
        self.model, self.cache, self.tokens = model, published._make_cache(model.config), 0
        with torch.no_grad():
            self.draft(text, torch.zeros(1, BLOCK, HIDDEN, dtype=text.dtype, device=text.device))

    def draft(self, new: Tensor, block: Tensor) -> Tensor:
        """new: the hidden states of the tokens that were accepted since the last call."""
        first = self.tokens
        self.tokens += new.shape[1]
        hidden = self.model(
            target_hidden=new,
            noise_embedding=block,
            position_ids=torch.arange(first, self.tokens + BLOCK, device=new.device)[None],
            past_key_values=self.cache,
            use_cache=True,
        )
        published._crop_to(self.cache, self.tokens)
        return hidden

    @torch.no_grad()
    def round(self, verified: Tensor, block: Tensor) -> Tensor:
        return self.draft(verified[:, :ACCEPTED], block)


def random_weights(drafter: DFlash2DraftModel) -> dict[str, Tensor]:
    """Of a size that keeps what a layer passes on near 1."""
    random = torch.Generator().manual_seed(0)
    weights = {}
    for name, tensor in drafter.state_dict().items():
        x = torch.randn(tensor.shape, generator=random)
        if name.endswith("norm.weight"):
            weights[name] = 1 + 0.1 * x
        elif "base_kernel" in name:
            weights[name] = 0.1 * x
            weights[name][:, 0] += 1
        else:
            weights[name] = x * (0.3 if "kernel_projection" in name else 1) / tensor.shape[-1] ** 0.5
    return weights


def models(device: str, dtype: torch.dtype) -> tuple[DFlash2DraftModel, torch.nn.Module | None]:
    drafter = DFlash2DraftModel(DraftConfig.from_dict(CONFIG))
    weights = random_weights(drafter)
    drafter.load_published(weights)
    theirs = None
    if published is not None:
        theirs = published.DFlash2DraftModel(Qwen3Config(**CONFIG)).eval().requires_grad_(False)
        renamed = {f"{n}.weight" if n.endswith("_codebook") else n: t for n, t in weights.items()}
        theirs.load_state_dict(renamed)
        theirs.to(device, dtype)
    return drafter.to(device, dtype).eval(), theirs


def medians(contenders: dict[str, Callable[[], object]], rounds: int, device: str) -> dict[str, float]:
    """Seconds a call, all contenders in turns; the first tenth is a warm-up."""

    def now() -> float:
        if device != "cpu":
            getattr(torch, device).synchronize()
        return time.perf_counter()

    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + rounds // 10 + 1):
        for name, call in contenders.items():
            start = now()
            call()
            seconds[name].append(now() - start)
    return {name: statistics.median(taken[rounds // 10 + 1 :]) for name, taken in seconds.items()}


def plot(rows: list[dict], window: int, file: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, label in (("dflash", "PyPI dflash 0.1.0"), ("ours", "torch_dflash2")):
        points = [(r["tokens"], 1000 * r["seconds"][name]) for r in rows if name in r["seconds"]]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
    axes.axvline(window, color="grey", linewidth=0.8, linestyle=":")
    axes.annotate("window", (window, 0), xytext=(4, 4), textcoords="offset points", color="grey")
    axes.set_xscale("log", base=2)
    axes.set_xticks([r["tokens"] for r in rows], [f"{r['tokens']:,}" for r in rows], rotation=30)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("committed tokens")
    axes.set_ylabel("milliseconds a drafting round, median")
    axes.legend()
    figure.savefig(file, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="mps" if torch.backends.mps.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=30, help="of each length")
    parser.add_argument("--json", type=pathlib.Path, help="a file to write all figures to")
    parser.add_argument("--plot", type=pathlib.Path, help="a .png to draw the cost against the length to")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    drafter, theirs = models(options.device, dtype)
    random = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(options.device, dtype)

    verified, block = normal(1, BLOCK, TAPS * HIDDEN), normal(1, BLOCK, HIDDEN)
    c = drafter.config
    print(
        f"{options.dtype} on {options.device}, {options.threads} threads, torch {torch.__version__}. A drafter of "
        f"{c.num_hidden_layers} layers, hidden size {c.hidden_size}, {c.num_attention_heads}/{c.num_key_value_heads} heads "
        f"of {c.head_dim}, window {c.sliding_window}; a block of {BLOCK}, {ACCEPTED} tokens committed a round.\n"
        f"Medians of {options.rounds} rounds in turns.\n\n"
        f"committed tokens    ms a round    dflash 0.1.0    ours / dflash    difference of hidden states"
    )
    rows, edges = [], {}
    for tokens in LENGTHS:
        text = normal(1, tokens, TAPS * HIDDEN)
        contenders = {"ours": Ours(drafter, text)}
        if tokens in (2048, LENGTHS[-1]):
            edges[tokens] = contenders["ours"]
        if theirs is not None:
            contenders["dflash"] = Published(theirs, text)
        hidden = [x.round(verified, block).float() for x in contenders.values()]  # the same work? nearly the same result
        difference = ((hidden[0] - hidden[-1]).norm() / hidden[-1].norm()).item()
        calls = {name: lambda x=x: x.round(verified, block) for name, x in contenders.items()}
        seconds = medians(calls, options.rounds, options.device)
        rows.append({"tokens": tokens, "seconds": seconds, "difference": difference})
        line = f"{tokens:16,}    {1000 * seconds['ours']:10.3f}"
        if theirs is not None:
            line += f"    {1000 * seconds['dflash']:12.3f}    {seconds['ours'] / seconds['dflash']:13.3f}    {difference:.1e}"
        print(line, flush=True)

    calls = {str(tokens): lambda x=x: x.round(verified, block) for tokens, x in edges.items()}
    short, long = medians(calls, options.rounds, options.device).values()
    print(f"\nOurs, in turns: {LENGTHS[-1]:,} tokens cost {long / short:.3f} times 2,048, at most {ALLOWED}.")
    if options.json:
        figures = {"date": time.strftime("%Y-%m-%d"), "device": options.device, "dtype": options.dtype}
        figures |= {"threads": options.threads, "torch": torch.__version__, "config": CONFIG}
        options.json.write_text(json.dumps({**figures, "rows": rows, "longest_over_2048": long / short}, indent=1) + "\n")
    if options.plot:
        plot(rows, c.sliding_window, options.plot)
    return int(long / short > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
