"""What a drafting round costs after a short and after a long text: with a ring, the same.

Drafts and commits with the example's drafter (window 512) in two caches that hold 600 and 4,000 tokens, in turns, and
compares the medians. The target's part, output head included, is left out, as it would hide a difference. Exit status 1
if the long text costs more than 1.15 times the short one.

    python benchmarks/drafting_round.py [--device mps] [--dtype bfloat16]
"""

import argparse
import pathlib
import statistics
import sys
import time

import torch

from torch_dflash2 import DFlash2DraftModel

DRAFTER = pathlib.Path(__file__).parents[1] / "examples/smollm2"
LENGTHS = (600, 4000)
ALLOWED = 1.15
ACCEPTED = 3  # tokens committed a round


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="mps" if torch.backends.mps.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()

    drafter = DFlash2DraftModel.from_pretrained(DRAFTER, dtype=getattr(torch, options.dtype), device=options.device)
    hidden_size, taps = drafter.config.hidden_size, len(drafter.target_layer_ids)
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(options.device)

    embeddings, tapped = normal(1, drafter.block_size, hidden_size), normal(1, drafter.block_size, taps * hidden_size)
    counts = torch.tensor([ACCEPTED], dtype=torch.int32, device=options.device)
    caches = {}
    for tokens in LENGTHS:
        caches[tokens] = drafter.make_cache()
        drafter.prefill_context(caches[tokens], drafter.context_features(normal(1, tokens, taps * hidden_size)))

    def finished() -> float:
        if options.device != "cpu":
            getattr(torch, options.device).synchronize()
        return time.perf_counter()

    seconds: dict[int, list[float]] = {tokens: [] for tokens in LENGTHS}
    for _ in range(options.rounds):
        for tokens, cache in caches.items():
            start = finished()
            drafter(embeddings, cache)
            drafter.commit_context(cache, drafter.context_features(tapped), counts)
            seconds[tokens].append(finished() - start)

    short, long = (statistics.median(seconds[tokens][options.rounds // 10 :]) for tokens in LENGTHS)
    print(f"{options.dtype} on {options.device}, window {drafter.window}, median of {options.rounds} rounds each, in turns:")
    for tokens, median in zip(LENGTHS, (short, long), strict=True):
        print(f"  {tokens:5} committed tokens  {1000 * median:7.3f} ms a round")
    print(f"  ratio {long / short:.3f}, at most {ALLOWED}")
    return int(long / short > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
