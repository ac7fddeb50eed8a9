"""Decodes a prompt with SmolLM2-135M-Instruct, speculatively and plainly, and compares the two.

`make demo PROMPT="..." DTYPE=bfloat16 BLOCK=6 MAX_NEW_TOKENS=128 DEVICE=cpu`: each may be left out. The same names work as
environment variables, and in small letters as options.
"""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

DEFAULT_PROMPT = "Write an email to my landlord about a leaking tap."  # its acceptance is near the mean of evaluate.py's
DTYPES = ("float32", "bfloat16")
CONTEXT = 8192  # tokens, of the target
OTHER_TOKENS = 24  # decoded in the dtype that was not asked for: only its speed is shown


@dataclass
class Request:
    prompt: str
    dtype: str
    block: int | None
    max_new_tokens: int
    device: str


class BadRequest(Exception):
    """What is wrong, in one line."""


def parse_request(arguments: list[str], environment: dict[str, str]) -> Request:
    """The options, or the environment where they are left out. Raises BadRequest."""

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> None:
            raise BadRequest(message)

    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, help in (
        ("prompt", "the user's turn"),
        ("dtype", f"{' or '.join(DTYPES)}; float32 if left out"),
        ("block", "rows the target verifies at once, 2..8; what suits device and dtype if left out"),
        ("max-new-tokens", "128 if left out"),
        ("device", "mps, cuda or cpu; mps if there is one, else cpu"),
    ):
        parser.add_argument(f"--{name}", help=help)
    options = vars(parser.parse_args(arguments))

    def given(name: str) -> str | None:  # make exports what was not given as empty
        return options[name] if options[name] is not None else environment.get(name.upper()) or None

    def whole_number(name: str, low: int, high: int) -> int | None:
        text = given(name)
        if text is None:
            return None
        text = text.strip()
        if not text.isdecimal() or len(text) > 9 or not low <= int(text) <= high:
            raise BadRequest(f"{name.upper()}: expected a whole number in {low}..{high}, got {text[:40]!r}")
        return int(text)

    prompt = given("prompt")
    if prompt is None:
        prompt = DEFAULT_PROMPT
    if not prompt.strip():
        raise BadRequest("PROMPT: expected some text, got only blanks")
    if any("\ud800" <= character <= "\udfff" for character in prompt):  # how Python passes on bytes that are not UTF-8
        raise BadRequest("PROMPT: expected text in UTF-8, got other bytes")
    dtype = given("dtype") or "float32"
    if dtype not in DTYPES:
        raise BadRequest(f"DTYPE: expected {' or '.join(DTYPES)}, got {dtype!r}")
    block = whole_number("block", 2, 8)
    max_new_tokens = whole_number("max_new_tokens", 1, CONTEXT)
    return Request(prompt, dtype, block, max_new_tokens or 128, usable_device(given("device")))


def usable_device(name: str | None) -> str:
    import torch

    usable = ["cpu"]
    if torch.cuda.is_available():
        usable.append("cuda")
    if torch.backends.mps.is_available():
        usable.append("mps")
    if name is None:
        return "mps" if "mps" in usable else "cpu"
    if name not in usable:
        raise BadRequest(f"DEVICE: expected {' or '.join(usable)} on this machine, got {name!r}")
    return name


class Terminal:
    """Prints text as its tokens come, holding back the bytes of a character that is not complete."""

    def __init__(self, tokenizer: Any, write: Callable[[str], Any]) -> None:
        self.tokenizer, self.write = tokenizer, write
        self.token_ids: list[int] = []
        self.shown = 0

    def add(self, token_ids: list[int]) -> None:
        self.token_ids += token_ids
        text = self.tokenizer.decode(self.token_ids, skip_special_tokens=True)
        complete = text.rstrip("\N{REPLACEMENT CHARACTER}")
        self.write(complete[self.shown :])
        self.shown = max(self.shown, len(complete))


def agreement(plain: list[int], speculative: list[int]) -> str:
    """`yes`, or how far the two texts are the same."""
    if plain == speculative:
        return "yes"
    same = next((i for i, pair in enumerate(zip(plain, speculative, strict=False)) if pair[0] != pair[1]), None)
    same = min(len(plain), len(speculative)) if same is None else same
    return f"no, the first {same} of {max(len(plain), len(speculative))} tokens are"


def ratio(stats: Any, base: Any) -> str:
    return f"{stats.tokens_per_second / base.tokens_per_second:.2f}" if stats.rounds and base.rounds else "-"


def run(request: Request) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print("Loading SmolLM2-135M-Instruct and its drafter", style="dim")
    with console.status(""):
        import smollm2
        import torch

        from torch_dflash2 import generate, greedy_generate
        from torch_dflash2.decoding import default_block_size

        dtype = getattr(torch, request.dtype)
        target, tokenizer, drafter = smollm2.load(dtype, request.device)
        input_ids = smollm2.prompt_ids(tokenizer, request.prompt, request.device)
        room = CONTEXT - input_ids.shape[1]
        if room < request.max_new_tokens:
            raise BadRequest(
                f"PROMPT: expected at most {CONTEXT} tokens with the {request.max_new_tokens} new ones, "
                f"got {input_ids.shape[1]} and {request.max_new_tokens}"
            )
        block = request.block or default_block_size(drafter, target)

        def plain(tokens: int = request.max_new_tokens) -> Any:
            return greedy_generate(target, input_ids, max_new_tokens=tokens)

        def speculative(tokens: int = request.max_new_tokens, **options: Any) -> Any:
            return generate(target, drafter, input_ids, max_new_tokens=tokens, block_size=block, **options)

        plain(4), speculative(8)  # the first calls do what is done only once

    threads = f", {torch.get_num_threads()} threads" if request.device == "cpu" else ""
    console.print(f"SmolLM2-135M-Instruct in {request.dtype} on {request.device}{threads}; blocks of {block}\n", style="dim")
    terminal = Terminal(tokenizer, lambda text: (sys.stdout.write(text), sys.stdout.flush()))
    speculative_runs = [speculative(on_tokens=terminal.add)]
    console.print("\n")

    console.print("That was decoded speculatively. Now plainly and speculatively once more, for the comparison", style="dim")
    with console.status(""):
        plain_runs = [plain()]
        speculative_runs.append(speculative())
        plain_runs.append(plain())
    other_dtype = DTYPES[1 - DTYPES.index(request.dtype)]
    console.print(f"Now plainly in {other_dtype}, for its speed", style="dim")
    with console.status(""):
        smollm2.use_few_row_linears(target.to(getattr(torch, other_dtype)))
        plain(4)
        other = plain(OTHER_TOKENS).stats

    # The quicker of two runs each: what another program takes from one run must not decide.
    first, second = (max(runs, key=lambda r: r.stats.tokens_per_second).stats for runs in (plain_runs, speculative_runs))
    columns = ((f"plain\n{request.dtype}", first), (f"speculative\n{request.dtype}", second), (f"plain\n{other_dtype}", other))
    table = Table("")
    for name, _ in columns:
        table.add_column(name, justify="right")
    for name, value in (
        ("tokens/s", lambda stats: f"{stats.tokens_per_second:.1f}" if stats.rounds else "-"),
        (f"ratio to plain {request.dtype}", lambda stats: ratio(stats, first)),
        (f"ratio to plain {other_dtype}", lambda stats: ratio(stats, other)),
        ("mean acceptance length", lambda stats: f"{stats.mean_acceptance_length:.2f}"),
        ("rounds", lambda stats: str(stats.rounds)),
    ):
        table.add_row(name, *(value(stats) for _, stats in columns))
    console.print(table)
    console.print(f"identical: {agreement(plain_runs[0].token_ids, speculative_runs[0].token_ids)}")
    if request.dtype == "bfloat16":
        console.print("(In bfloat16 the target's own choices depend on how many rows it computes at once.)", style="dim")


def main() -> int:
    try:
        run(parse_request(sys.argv[1:], dict(os.environ)))
    except BadRequest as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except FileNotFoundError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
