"""How much speculative decoding gains on each kind of text, and four prompts at once against one after the other.

    python benchmarks/kinds_of_text.py [--block-size N] [--max-new-tokens N] [--json FILE] [--plot FILE.png]

SmolLM2-135M-Instruct with its drafter, in float32 on the CPU. Every prompt is decoded plainly and speculatively in turn, on
the same target object; a figure is of all prompts of its kind. Needs what `make demo` installs, and matplotlib for --plot.
"""

import argparse
import json
import pathlib
import platform
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples/smollm2"))

DOCUMENT = "CONTRIBUTING.md"  # a text of about a thousand tokens, none of which the drafter has seen
KINDS = {
    "story": (
        "Write a short story about a robot who learns to paint.",
        "Write a story about a boy who finds a map in a bottle.",
        "Tell me a story about the last tree on earth.",
    ),
    "explanation": ("Explain how a rainbow forms.", "Why do we have seasons?", "How do airplanes stay in the sky?"),
    "list": (
        "List five healthy breakfast ideas.",
        "List ten things to pack for a beach holiday.",
        "What are some good habits for students?",
    ),
    "code": (
        "Write a Python function that checks whether a list is sorted.",
        "How do I read a CSV file in Python?",
        "Write a for loop in C that sums an array.",
    ),
    "rewrite": (
        "Rewrite this to sound more polite: Send me the documents now, I have been waiting all week.",
        "Fix the spelling: I recieved you're mesage and will definately reply tommorow.",
        "Summarize: The library will close at noon on Saturday for repairs. Books may be returned in the box by the door."
        " It opens again on Monday.",
    ),
    "long document": (
        "What is this document about?\n\n{document}",
        "Summarize this document.\n\n{document}",
        "List the main points of this document.\n\n{document}",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-size", type=int, choices=range(2, 9), metavar="2..8")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE.png")
    options = parser.parse_args()

    import smollm2
    import torch
    from rich.console import Console
    from rich.table import Table

    from torch_dflash2 import generate, greedy_generate
    from torch_dflash2.decoding import default_block_size

    target, tokenizer, drafter = smollm2.load(torch.float32, "cpu")
    block = options.block_size or default_block_size(drafter, target)
    document = (ROOT / DOCUMENT).read_text()
    prompts = {
        kind: [smollm2.prompt_ids(tokenizer, text.format(document=document), "cpu") for text in texts]
        for kind, texts in KINDS.items()
    }

    def plain(ids, tokens=options.max_new_tokens):
        return greedy_generate(target, ids, max_new_tokens=tokens)

    def speculative(ids, tokens=options.max_new_tokens):
        return generate(target, drafter, ids, max_new_tokens=tokens, block_size=block)

    plain(prompts["story"][0], 4), speculative(prompts["story"][0], 8)  # what is done only once
    console, rows = Console(highlight=False), []
    with console.status("") as status:
        for kind, several in prompts.items():
            status.update(kind)
            pairs = [(plain(ids), speculative(ids)) for ids in several]
            new = [result.stats.new_tokens - 1 for _, result in pairs]
            speeds = [result.stats.tokens_per_second / base.stats.tokens_per_second for base, result in pairs]
            rows.append(
                {
                    "kind": kind,
                    "prompt_tokens": round(statistics.mean(ids.shape[1] for ids in several)),
                    "mean_acceptance_length": sum(new) / sum(result.stats.rounds for _, result in pairs),
                    "ratio_to_plain": statistics.median(speeds),
                    "identical": sum(base.token_ids == result.token_ids for base, result in pairs),
                    "prompts": len(several),
                }
            )
        status.update("four at once")
        lanes = four_at_once(generate, target, drafter, [several[0] for several in prompts.values()][:4], block, options)

    report = {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "block_size": block,
        "max_new_tokens": options.max_new_tokens,
        "kinds": rows,
        "four_at_once": lanes,
    }
    table = Table("kind", "prompt tokens", "mean acceptance length", "ratio to plain greedy", "identical")
    for row in rows:
        table.add_row(
            row["kind"],
            str(row["prompt_tokens"]),
            f"{row['mean_acceptance_length']:.2f}",
            f"{row['ratio_to_plain']:.2f}",
            f"{row['identical']} of {row['prompts']}",
        )
    console.print(f"SmolLM2-135M-Instruct, float32, {report['machine']}; blocks of {block}; ratio: median of prompts")
    console.print(table)
    console.print(
        f"four prompts at once against one after the other, with their prompts read: {lanes['ratio']:.2f} times the tokens a "
        f"second (blocks of {lanes['block_size']}; {lanes['identical']} of 4 texts identical)"
    )
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.plot:
        plot(report, options.plot)


def four_at_once(generate, target, drafter, prompts, block, options) -> dict:
    """Throughput in the same run: the quicker of two each, in turns."""
    arguments = {"max_new_tokens": options.max_new_tokens, "block_size": block, "stop_token_ids": ()}
    seconds, results = {"one": [], "four": []}, {}
    for _ in range(2):
        for name, run in (
            ("one", lambda: [generate(target, drafter, ids, **arguments) for ids in prompts]),
            ("four", lambda: generate(target, drafter, prompts, **arguments)),
        ):
            start = time.perf_counter()
            results[name] = [result.token_ids for result in run()]
            seconds[name].append(time.perf_counter() - start)
    return {
        "block_size": block,
        "ratio": min(seconds["one"]) / min(seconds["four"]),
        "identical": sum(a == b for a, b in zip(*results.values(), strict=True)),
    }


def plot(report: dict, file: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [row["kind"] for row in report["kinds"]]
    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    for offset, key, label in (
        (-0.2, "mean_acceptance_length", "tokens a round (mean acceptance length)"),
        (0.2, "ratio_to_plain", "speed, plain greedy = 1"),
    ):
        values = [row[key] for row in report["kinds"]]
        bars = axes.bar([i + offset for i in range(len(names))], values, 0.38, label=label)
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(names)), names)
    axes.set_title(f"SmolLM2-135M-Instruct, float32, {report['machine']}, blocks of {report['block_size']}", fontsize=10)
    axes.legend(fontsize=8, loc="upper left", ncols=2)
    axes.margins(y=0.2)  # for the legend
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
