"""Decodes 32 prompts that the drafter has not seen, plainly and speculatively: acceptance, speed and whether they agree.

`make evaluate BLOCK=4`, or `python examples/smollm2/evaluate.py --block-size 3 4 6 8 --prompts 8 --json`. In float32 the exit
status is 1 if any text differs.
"""

import argparse
import json
import platform
import statistics
import sys

# Each prompt's wording and topic was kept out of what the drafter was trained on.
PROMPTS = (
    "Write a short story about a robot who learns to paint.",
    "Write a story about a boy who finds a map in a bottle.",
    "Tell me a story about the last tree on earth.",
    "Write a poem about autumn leaves.",
    "Explain how a rainbow forms.",
    "Explain what a computer virus is to my grandmother.",
    "Why do we have seasons?",
    "What causes ocean tides?",
    "Explain the theory of relativity in simple words.",
    "How do airplanes stay in the sky?",
    "What is the difference between a virus and a bacterium?",
    "List five healthy breakfast ideas.",
    "List ten things to pack for a beach holiday.",
    "Give me 5 names for a new coffee shop.",
    "What are some good habits for students?",
    "Give me tips for a first date.",
    "Write a Python function that checks whether a list is sorted.",
    "Write a Python program that prints a right triangle of stars.",
    "How do I read a CSV file in Python?",
    "Write a SQL query that returns the ten most expensive products.",
    "Write a for loop in C that sums an array.",
    "Rewrite this to sound more polite: Send me the documents now, I have been waiting all week.",
    "Fix the spelling: I recieved you're mesage and will definately reply tommorow.",
    "Summarize: The library will close at noon on Saturday for repairs. Books may be returned in the box by the door."
    " It opens again on Monday.",
    "Write an email to my landlord about a leaking tap.",
    "Write a thank you note to a colleague who helped me move.",
    "Who was Albert Einstein?",
    "What is the tallest mountain in the world?",
    "Should I learn piano or guitar?",
    "Describe a quiet morning in a small village.",
    "Give me a simple recipe for tomato soup.",
    "How can I fall asleep faster?",
)
PHASES = ("draft", "propose", "verify", "commit", "other")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-size", type=int, nargs="+", default=[8], metavar="2..8", choices=range(2, 9))
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), metavar="1..32", choices=range(1, len(PROMPTS) + 1))
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    options = parser.parse_args(arguments)

    import smollm2
    import torch
    from rich.console import Console
    from rich.table import Table

    from torch_dflash2 import generate, greedy_generate

    target, tokenizer, drafter = smollm2.load(getattr(torch, options.dtype), options.device)
    prompts = PROMPTS[:: len(PROMPTS) // options.prompts][: options.prompts]  # spread over all kinds
    plain, speculative = [], {block: [] for block in options.block_size}
    console = Console(stderr=True, highlight=False)
    with console.status("Warming up") as status:
        for number, prompt in enumerate((prompts[0], *prompts)):
            input_ids = smollm2.prompt_ids(tokenizer, prompt, options.device)
            tokens = options.max_new_tokens if number else 4
            baseline = greedy_generate(target, input_ids, max_new_tokens=tokens)
            results = {
                block: generate(target, drafter, input_ids, max_new_tokens=tokens, block_size=block, profile=True)
                for block in speculative
            }
            if number:
                plain.append(baseline)
                for block, result in results.items():
                    speculative[block].append(result)
            status.update(f"{number} of {len(prompts)} prompts")

    rows = []
    for block, results in speculative.items():
        stats = [result.stats for result in results]
        rounds = sum(s.rounds for s in stats)
        speeds = [s.tokens_per_second / p.stats.tokens_per_second for s, p in zip(stats, plain, strict=True) if s.rounds]
        rows.append(
            {
                "block_size": block,
                "tokens_per_second": sum(s.new_tokens - 1 for s in stats) / sum(s.decode_seconds for s in stats),
                "ratio_median_of_prompts": statistics.median(speeds),
                "mean_acceptance_length": sum(s.new_tokens - 1 for s in stats) / rounds,
                "rounds": rounds,
                "identical": sum(r.token_ids == p.token_ids for r, p in zip(results, plain, strict=True)),
                "milliseconds_a_round": {
                    phase: 1000 * sum(getattr(s, f"{phase}_seconds") for s in stats) / rounds for phase in PHASES
                },
            }
        )
    plain_speed = sum(p.stats.new_tokens - 1 for p in plain) / sum(p.stats.decode_seconds for p in plain)
    where = {
        "dtype": options.dtype,
        "device": options.device,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "prompts": len(prompts),
        "max_new_tokens": options.max_new_tokens,
    }
    if options.json:
        print(json.dumps({**where, "plain_tokens_per_second": plain_speed, "speculative": rows}, indent=1))
    else:
        table = Table(title=", ".join(f"{name} {value}" for name, value in where.items()))
        for name in ("block", "tokens/s", "ratio", "mean acceptance length", "rounds", "identical", *PHASES):
            table.add_column(name, justify="right")
        table.add_row("plain", f"{plain_speed:.1f}", "1.00", "1.00", str(sum(p.stats.rounds for p in plain)))
        for row in rows:
            table.add_row(
                str(row["block_size"]),
                f"{row['tokens_per_second']:.1f}",
                f"{row['ratio_median_of_prompts']:.2f}",
                f"{row['mean_acceptance_length']:.2f}",
                str(row["rounds"]),
                f"{row['identical']} of {len(prompts)}",
                *(f"{row['milliseconds_a_round'][phase]:.1f}" for phase in PHASES),
            )
        Console(highlight=False).print(table)
        print("ratio: to plain greedy in the same dtype, median over the prompts; draft to other: milliseconds a round")
    return int(options.dtype == "float32" and any(row["identical"] < len(prompts) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
