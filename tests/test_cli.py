"""python -m torch_dflash2, with a tiny target and drafter on disk."""

import json
import shutil
import subprocess
import sys

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from test_decoding import draft_config, make_target
from test_drafter import one_thread, published  # noqa: F401

import torch_dflash2
from torch_dflash2.__main__ import main
from torch_dflash2.decoding import Decoder

transformers.utils.logging.disable_progress_bar()
CHAT = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
CHARACTERS = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;?!-+*/()'\"&%$#@<>=_[]{}|~^`\\\n\t"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a target, with one token a character, and its drafter."""
    folder = tmp_path_factory.mktemp("models")
    target = make_target(seed=2)
    target.save_pretrained(folder / "target")
    vocabulary = {character: number for number, character in enumerate(CHARACTERS[:97])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT)
    fast.save_pretrained(folder / "target")
    config = draft_config()
    (folder / "draft").mkdir()
    (folder / "draft/config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in published(config).state_dict().items()},
        folder / "draft/model.safetensors",
    )
    return folder


@pytest.fixture
def command(models, capsys):
    def run(name, *arguments, device="cpu"):
        status = main(
            [name, "--target", str(models / "target"), "--draft", str(models / "draft"), "--device", device, *arguments]
        )
        out, err = capsys.readouterr()
        return status, out, err

    return run


def plain_text(models, prompt, tokens):
    target = transformers.AutoModelForCausalLM.from_pretrained(models / "target").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(models / "target")
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    return tokenizer.decode(torch_dflash2.greedy_generate(target, ids, max_new_tokens=tokens).token_ids)


def test_generate_prints_the_targets_text(models, command, device):
    want = plain_text(models, "u:hello;a:", 30)
    status, out, err = command("generate", "--prompt", "hello", "--max-new-tokens", "30", device=device)
    assert (status, out, err) == (0, want + "\n", "")


def test_json(models, command):
    status, out, _ = command("generate", "--prompt", "what?", "--raw", "--max-new-tokens", "12", "--block-size", "3", "--json")
    report = json.loads(out)
    assert status == 0 and report["text"] == plain_text(models, "what?", 12)
    assert len(report["token_ids"]) == report["new_tokens"] == 12
    assert (report["finish_reason"], report["prompt_tokens"], report["block_size"]) == ("length", 5, 3)


def test_samples_repeat_with_a_seed(command):
    def sample(seed):
        return command(
            "generate", "--prompt", "x", "--temperature", "1.5", "--top-k", "20", "--seed", seed, "--max-new-tokens", "9"
        )[1]

    assert sample("1") == sample("1") != sample("2")


def test_the_prompt_may_come_from_standard_input(models):
    options = ["--target", models / "target", "--draft", models / "draft", "--device", "cpu", "--max-new-tokens", "8"]
    run = subprocess.run(
        [sys.executable, "-m", "torch_dflash2", "generate", *options],
        input="hello",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (run.returncode, run.stdout) == (0, plain_text(models, "u:hello;a:", 8) + "\n")


def test_ctrl_c_ends_with_what_there_is(models, command, monkeypatch):
    want = plain_text(models, "u:hello;a:", 40)
    commits = []
    inner = torch_dflash2.DFlash2DraftModel.commit_context

    def interrupted(*args):
        commits.append(1)
        if len(commits) == 5:
            raise KeyboardInterrupt
        return inner(*args)

    monkeypatch.setattr(torch_dflash2.DFlash2DraftModel, "commit_context", interrupted)
    status, out, err = command("generate", "--prompt", "hello", "--max-new-tokens", "40")
    assert status == 130 and want.startswith(out[:-1]) and 5 <= len(out[:-1]) < 40 and err == ""
    commits.clear()
    status, out, _ = command("generate", "--prompt", "hello", "--max-new-tokens", "40", "--json")
    report = json.loads(out)
    assert status == 130 and report["finish_reason"] == "interrupt" and want.startswith(report["text"]) and report["token_ids"]


def test_chat_remembers_and_an_interrupt_ends_only_the_answer(models, command, monkeypatch):
    turns = iter(["hello", "  ", "and then?", EOFError])
    read = []

    def next_turn(prompt):
        turn = next(turns)
        if turn is EOFError:
            raise EOFError
        return turn

    monkeypatch.setattr("builtins.input", next_turn)
    inner = Decoder.prefill
    monkeypatch.setattr(
        Decoder,
        "prefill",
        lambda self, lane, ids, *rest: (read.append(ids.shape[1]), inner(self, lane, ids, *rest))[1],
    )
    status, out, _ = command("chat", "--max-new-tokens", "10")
    first = plain_text(models, "u:hello;a:", 10)
    second = plain_text(models, f"u:hello;a:{first};u:and then?;a:", 10)
    assert status == 0 and out == f"{first}\n{second}\n\n"
    assert read[0] == len("u:hello;a:") and read[1] <= len("; u:and then?;a:")


def test_bench(command):
    status, out, _ = command("bench", "--prompt", "hello", "--max-new-tokens", "10", "--json")
    report = json.loads(out)
    assert status == 0 and report["identical"] is True and report["new_tokens"] == 10
    assert report["ratio"] == pytest.approx(report["speculative_tokens_per_second"] / report["plain_tokens_per_second"])
    status, out, _ = command("bench", "--prompt", "hello", "--max-new-tokens", "10")
    assert "ratio: " in out and "identical: True" in out


def test_info_tells_the_truth(capsys):
    assert main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["torch"] == torch.__version__ and report["torch_dflash2"] == torch_dflash2.__version__
    assert report["metal"] == "available"  # the tests' stand-in
    for paths in report["operators"].values():
        assert paths == {"cpu": "C++ kernel", "mps": "Metal kernel", "cuda": "plain PyTorch (torch_dflash2.reference)"}
    run = subprocess.run([sys.executable, "-m", "torch_dflash2", "info"], capture_output=True, text=True, timeout=60)
    if sys.platform == "linux":
        assert "pack_attention: on cpu C++ kernel; on mps none: this PyTorch was built without MPS" in run.stdout


MODELS = ["--target", "T", "--draft", "D", "--device", "cpu"]


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["generate", "--prompt", "x"], "the following arguments are required: --target, --draft"),
        (["dance"], "invalid choice: 'dance'"),
        (["generate", "--target", "/none", "--draft", "D", "--prompt", "x"], "--target: cannot load /none: "),
        (["generate", "--target", "T", "--draft", "/none", "--prompt", "x"], "--draft: cannot load /none: "),
        (["generate", *MODELS, "--device", "tpu"], "--device: expected mps or cpu on this machine, got tpu"),
        (["generate", *MODELS, "--prompt", " "], "--prompt: expected some text, got only blanks"),
        (["generate", *MODELS, "--prompt", "caf\udce9"], "--prompt: expected text in UTF-8, got other bytes"),
        (["generate", *MODELS, "--max-new-tokens", "0"], "--max-new-tokens: expected at least 1, got 0"),
        (["generate", *MODELS, "--prompt", "x", "--block-size", "99"], "block_size: expected a whole number in 2..8"),
        (["generate", *MODELS, "--temperature", "-1"], "temperature: expected a number in 1e-6..1e6, got -1.0"),
        (["generate", *MODELS, "--temperature", "1", "--top-p", "2"], "top_p: expected a number in (0, 1], got 2.0"),
        (["generate", *MODELS, "--top-p", "0.9"], "--top-p: expected a --temperature above 0 with it, got greedy decoding"),
        (["generate", *MODELS, "--top-k", "9"], "--top-k: expected a --temperature above 0 with it, got greedy decoding"),
        (["chat", *MODELS, "--seed", "0"], "--seed: expected a --temperature above 0 with it, got greedy decoding"),
        (["generate", *MODELS, "--temperature", "1", "--seed", "-1"], "--seed: expected a number in 0..2**63-1, got -1"),
        (["generate", *MODELS, "--temperature", "1", "--seed", str(2**63)], "--seed: expected a number in 0..2**63-1, got"),
        (["generate", *MODELS, "--prompt", "x", "--max-new-tokens", str(2**31)], "max_new_tokens: expected a whole number"),
    ],
)
def test_what_is_wrong_takes_one_line(models, capsys, arguments, message):
    folders = {"T": str(models / "target"), "D": str(models / "draft")}
    assert main([folders.get(argument, argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("torch_dflash2: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "file,content,message",
    [
        ("draft/config.json", b"[]", "--draft: cannot load"),
        ("draft/config.json", b"\xff", "--draft: cannot load"),
        ("draft/model.safetensors", b"", "--draft: cannot load"),
        ("target/model.safetensors", b"{", "--target: cannot load"),
        ("target/config.json", b"[]", "--target: cannot load"),
        ("target/tokenizer.json", b"{}", "--target: cannot load"),
        ("target/chat_template.jinja", b"{{ raise_exception('no user') }}", "--target: its chat template fails: no user"),
        ("target/chat_template.jinja", b"{% if", "--target: its chat template fails: "),
        ("target/chat_template.jinja", b"{% if 0 %}x{% endif %}", "--prompt: expected text of at least one token, got none"),
    ],
)
def test_broken_files_take_one_line(models, tmp_path, capsys, file, content, message):
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    (tmp_path / file).write_bytes(content)
    folders = ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft")]
    assert main(["generate", *folders, "--device", "cpu", "--prompt", "x"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"torch_dflash2: {message}") and err.count("\n") == 1


def test_chat_goes_on_after_bytes_that_are_no_text(models):
    options = ["--target", models / "target", "--draft", models / "draft", "--device", "cpu", "--max-new-tokens", "6"]
    run = subprocess.run(
        [sys.executable, "-m", "torch_dflash2", "chat", *options],
        input=b"caf\xe9\nhello\n",
        capture_output=True,
        timeout=120,
    )
    assert run.returncode == 0 and run.stderr.decode() == "torch_dflash2: expected text in UTF-8, got other bytes\n"
    assert run.stdout.decode() == f"> > {plain_text(models, 'u:hello;a:', 6)}\n> \n"
