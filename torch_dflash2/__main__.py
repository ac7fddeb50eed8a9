"""python -m torch_dflash2 generate | chat | bench | info

Decodes with a Hugging Face model, the target, and the DFlash drafter made for it. Both are folders, or ids of the Hugging
Face Hub. Without --prompt, `generate` and `bench` read the prompt from standard input.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KERNELS = {"CPU": "C++ kernel", "MPS": "Metal kernel", "CUDA": "plain PyTorch (torch_dflash2.reference)"}


class Refused(Exception):
    """What is wrong, in one line."""


class Models(NamedTuple):
    target: Any
    tokenizer: Any
    drafter: Any


def main(arguments: list[str] | None = None) -> int:
    try:
        options = parser().parse_args(arguments)
        return options.run(options)
    except Refused as error:
        print(f"torch_dflash2: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # who read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def parser() -> argparse.ArgumentParser:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> Any:
            raise Refused(message)

    whole = Parser(prog="python -m torch_dflash2", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = whole.add_subparsers(metavar="generate | chat | bench | info", required=True)

    models = Parser(add_help=False)
    models.add_argument("--target", required=True, help="the model whose text it is: a folder or a Hub id")
    models.add_argument("--draft", required=True, help="its drafter: a folder or a Hub id")
    models.add_argument("--device", help="mps, cuda or cpu; the first of these that there is, if left out")
    models.add_argument("--dtype", choices=DTYPES, default="auto", help="of target and drafter; as stored if left out")
    models.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="512 if left out")
    models.add_argument("--block-size", type=int, metavar="N", help="rows to verify at once; what suits the device if left out")
    models.add_argument("--compile", action="store_true", help="run the drafter through torch.compile")
    sampling = Parser(add_help=False)
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, greedy, if left out")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K")
    sampling.add_argument("--seed", type=int, metavar="N", help="makes samples repeat")
    prompts = Parser(add_help=False)
    prompts.add_argument("--prompt", help="standard input if left out")
    prompts.add_argument("--raw", action="store_true", help="the prompt is text to continue, not a user's turn of a chat")
    output = Parser(add_help=False)
    output.add_argument("--json", action="store_true", help="print one JSON object")

    for name, run, about, parents in (
        ("generate", generate_command, "continue a prompt", [models, sampling, prompts, output]),
        ("chat", chat_command, "talk; Ctrl-C ends an answer, Ctrl-D the chat", [models, sampling]),
        ("bench", bench_command, "time speculative against plain greedy decoding", [models, prompts, output]),
        ("info", info_command, "what runs where on this machine, and why", [output]),
    ):
        command = commands.add_parser(name, help=about, description=about, parents=parents)
        command.set_defaults(run=run)
    return whole


# ---- commands


def generate_command(options: argparse.Namespace) -> int:
    from . import generate

    models = load(options)
    ids = prompt_ids(models, read_prompt(options), options)
    stream, token_ids = None if options.json else text_stream(models.tokenizer), list[int]()

    def show(tokens: list[int]) -> None:
        token_ids.extend(tokens)
        if stream:
            stream.put(torch.tensor(tokens))

    result, reason = None, "interrupt"
    try:
        with refusing(ValueError, RuntimeError):
            result = generate(
                models.target,
                models.drafter,
                ids,
                max_new_tokens=options.max_new_tokens,
                block_size=options.block_size,
                sampling=sampling_of(options, models.drafter.device),
                compile=options.compile,
                on_tokens=show,
            )
            reason = result.finish_reason
    except KeyboardInterrupt:
        pass
    if stream:
        stream.end()
    else:
        text = models.tokenizer.decode(token_ids, skip_special_tokens=True)
        report = {"text": text, "token_ids": token_ids, "finish_reason": reason, "prompt_tokens": ids.shape[1]}
        if result:
            report |= statistics(result.stats)
        print(json.dumps(report))
    return 0 if result else 130


def chat_command(options: argparse.Namespace) -> int:
    from . import Session

    models = load(options)
    if not models.tokenizer.chat_template:
        raise Refused(f"--target: expected a model with a chat template to chat with, got {options.target}")
    sampling = sampling_of(options, models.drafter.device)

    def new_session() -> Session:
        with refusing(ValueError):
            return Session(
                models.target, models.drafter, block_size=options.block_size, sampling=sampling, compile=options.compile
            )

    session, messages, stream = new_session(), list[dict[str, str]](), text_stream(models.tokenizer)
    while True:
        try:
            line = input("> ")
            line.encode()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        except UnicodeError:
            print("torch_dflash2: expected text in UTF-8, got other bytes", file=sys.stderr)
            continue
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        whole = chat_ids(models.tokenizer, messages)
        # What the template made of the earlier turns may differ from what was read and generated: keep what agrees.
        same = next((i for i, (a, b) in enumerate(zip(session.token_ids, whole, strict=False)) if a != b), None)
        same = min(len(session.token_ids), len(whole) - 1) if same is None else same
        try:
            session.rewind(same)
        except (ValueError, RuntimeError):  # not with this target
            session, same = new_session(), 0
        start = len(whole)
        try:
            with refusing(ValueError, RuntimeError):
                session.generate(
                    torch.tensor([whole[same:]], device=models.drafter.device),
                    max_new_tokens=options.max_new_tokens,
                    on_tokens=lambda tokens: stream.put(torch.tensor(tokens)),
                )
        except KeyboardInterrupt:
            pass
        stream.end()
        answer = models.tokenizer.decode(session.token_ids[start:], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})


def bench_command(options: argparse.Namespace) -> int:
    from . import generate, greedy_generate

    models = load(options)
    ids = prompt_ids(models, read_prompt(options), options)

    def plain(tokens: int) -> Any:
        return greedy_generate(models.target, ids, max_new_tokens=tokens)

    def speculative(tokens: int) -> Any:
        return generate(
            models.target,
            models.drafter,
            ids,
            max_new_tokens=tokens,
            block_size=options.block_size,
            compile=options.compile,
        )

    with refusing(ValueError, RuntimeError), progress("Decoding"):
        plain(min(4, options.max_new_tokens)), speculative(min(16, options.max_new_tokens))  # what is done only once
        runs = [(plain(options.max_new_tokens), speculative(options.max_new_tokens)) for _ in range(2)]
    # The quicker of two runs each: what another program takes from one run must not decide.
    first, second = (max(side, key=lambda r: r.stats.tokens_per_second) for side in zip(*runs, strict=True))
    speeds = first.stats.tokens_per_second, second.stats.tokens_per_second
    report = {
        "plain_tokens_per_second": speeds[0],
        "speculative_tokens_per_second": speeds[1],
        "ratio": speeds[1] / speeds[0] if all(speeds) else None,
        "identical": first.token_ids == second.token_ids,
        "device": str(models.drafter.device),
        "dtype": str(models.target.dtype).removeprefix("torch."),
        **statistics(second.stats),
    }
    if options.json:
        print(json.dumps(report))
    else:
        for name, value in report.items():
            print(
                f"{name.replace('_', ' ')}: {value:.2f}" if isinstance(value, float) else f"{name.replace('_', ' ')}: {value}"
            )
    return 0


def info_command(options: argparse.Namespace) -> int:
    from . import __version__, is_metal_available
    from ._library import NAMES

    devices = {
        "cpu": f"{torch.get_num_threads()} threads",
        "mps": "available" if torch.backends.mps.is_available() else "none",
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }
    metal = is_metal_available()
    paths = {}
    for name in NAMES:
        paths[name] = {
            device: KERNELS[device.upper()]
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"dflash2::{name}", device.upper())
            else "none"
            for device in devices
        }
        if not metal:
            paths[name]["mps"] = f"none: {metal.reason}"
    report = {
        "torch_dflash2": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
        "devices": devices,
        "metal": str(metal),
        "operators": paths,
    }
    if options.json:
        print(json.dumps(report))
        return 0
    for key, value in report.items():
        if not isinstance(value, dict):
            print(f"{key}: {value}")
    for device, what in devices.items():
        print(f"device {device}: {what}")
    for name, by_device in paths.items():
        print(f"{name}: " + "; ".join(f"on {device} {path}" for device, path in by_device.items()))
    return 0


# ---- what they share


def load(options: argparse.Namespace) -> Models:
    if options.max_new_tokens < 1:
        raise Refused(f"--max-new-tokens: expected at least 1, got {options.max_new_tokens}")
    device = usable_device(options.device)
    sampling_of(options, device)  # what is wrong there is known before minutes of loading
    try:
        import transformers
    except ImportError:
        raise Refused("transformers is missing: pip install 'torch_dflash2[generate]'") from None
    from . import DFlashDraftModel
    from .few_rows import use_few_row_linears

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with refusing(Exception, what=f"--target: cannot load {options.target}: "), progress(f"Loading {options.target}"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.target)
        target: Any = transformers.AutoModelForCausalLM.from_pretrained(options.target, dtype=DTYPES[options.dtype])
        target = target.to(device).eval()
    with refusing(Exception, what=f"--draft: cannot load {options.draft}: "), progress(f"Loading {options.draft}"):
        dtype = None if options.dtype == "auto" else DTYPES[options.dtype]
        drafter = DFlashDraftModel.from_pretrained(options.draft, dtype=dtype, device=device)
    if device == "cpu":
        use_few_row_linears(target), use_few_row_linears(drafter)
    return Models(target, tokenizer, drafter)


def usable_device(name: str | None) -> str:
    usable = ["cpu"]
    if torch.cuda.is_available():
        usable.insert(0, "cuda")
    if torch.backends.mps.is_available():
        usable.insert(0, "mps")
    if name is not None and name not in usable:
        raise Refused(f"--device: expected {' or '.join(usable)} on this machine, got {name}")
    return name or usable[0]


def sampling_of(options: argparse.Namespace, device: Any) -> Any:
    """None for greedy."""
    from .sampling import Sampling

    if getattr(options, "temperature", 0.0) == 0.0:
        for name, unused in (("top_p", 1.0), ("top_k", 0), ("seed", None)):
            if getattr(options, name, unused) != unused:
                raise Refused(f"--{name.replace('_', '-')}: expected a --temperature above 0 with it, got greedy decoding")
        return None
    if options.seed is not None and not 0 <= options.seed < 2**63:
        raise Refused(f"--seed: expected a number in 0..2**63-1, got {options.seed}")
    generator = torch.Generator(device)
    generator.seed() if options.seed is None else generator.manual_seed(options.seed)
    with refusing(ValueError):
        return Sampling(options.temperature, options.top_p, options.top_k, generator)


def read_prompt(options: argparse.Namespace) -> str:
    try:
        prompt = sys.stdin.read() if options.prompt is None else options.prompt
        prompt.encode()  # fails where the shell's bytes were not UTF-8
    except UnicodeError:
        raise Refused("--prompt: expected text in UTF-8, got other bytes") from None
    if not prompt.strip():
        raise Refused("--prompt: expected some text, got only blanks")
    return prompt


def prompt_ids(models: Models, prompt: str, options: argparse.Namespace) -> torch.Tensor:
    if options.raw or not models.tokenizer.chat_template:
        ids = models.tokenizer(prompt).input_ids
    else:
        ids = chat_ids(models.tokenizer, [{"role": "user", "content": prompt}])
    if not ids:
        raise Refused("--prompt: expected text of at least one token, got none from the tokenizer")
    return torch.tensor([ids], device=models.drafter.device)


def chat_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    with refusing(Exception, what="--target: its chat template fails: "):
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True).input_ids)


def text_stream(tokenizer: Any) -> Any:
    from transformers import TextStreamer

    return TextStreamer(tokenizer, skip_special_tokens=True)


def statistics(stats: Any) -> dict[str, Any]:
    return {
        "new_tokens": stats.new_tokens,
        "rounds": stats.rounds,
        "block_size": stats.block_size,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "tokens_per_second": stats.tokens_per_second,
    }


@contextmanager
def refusing(*kinds: type[Exception], what: str = "") -> Iterator[None]:
    """Makes errors of these kinds one line."""
    try:
        yield
    except kinds as error:
        raise Refused(what + (" ".join(str(error).split()) or type(error).__name__)) from error


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Says on a terminal what takes so long."""
    if not sys.stderr.isatty():
        yield
        return
    try:
        from rich.console import Console
    except ImportError:
        print(f"{what} ...", file=sys.stderr, flush=True)
        yield
        return
    with Console(stderr=True).status(what):
        yield


if __name__ == "__main__":
    sys.exit(main())
