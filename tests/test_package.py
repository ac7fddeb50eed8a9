"""The package as it is built, shipped and imported."""

import os
import pathlib
import subprocess
import sys
import tarfile

import pytest
import torch

import torch_dflash2

ROOT = pathlib.Path(__file__).parents[1]


def run(*command, **options):
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_sdist_holds_every_source_and_shader(tmp_path):
    run("setup.py", "-q", "sdist", "--dist-dir", str(tmp_path), cwd=ROOT)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        held = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    wanted = {"setup.py", "pyproject.toml", "README.md", "LICENSE", "torch_dflash2/py.typed"}
    for folder in ("", "csrc", "shaders"):
        for path in (ROOT / "torch_dflash2" / folder).iterdir():
            if path.suffix in (".py", ".cpp", ".h", ".mm", ".metal"):
                wanted.add(str(path.relative_to(ROOT)))
    assert wanted <= held, wanted - held
    assert not any(name.endswith((".so", ".safetensors")) for name in held)


@pytest.mark.parametrize("flags", [[], ["-W", "error"]])
def test_importing_needs_torch_alone_and_works_twice(flags):
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformers", "safetensors", "tokenizers", "gguf", "rich", "accelerate", "huggingface_hub"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import torch, importlib
import torch_dflash2
del sys.modules["torch_dflash2"]
import torch_dflash2
import torch_dflash2.cache, torch_dflash2.drafter, torch_dflash2.decoding
lengths = torch.ones(1, dtype=torch.int32)
print(tuple(torch.ops.dflash2.fill_attention_mask(lengths, 1, 2, 4).shape))
"""
    assert run(*flags, "-c", code, cwd=ROOT) == "(1, 1, 2, 5)\n"


def test_importing_in_a_forked_child():
    code = """
import os, torch
child = os.fork()
import torch_dflash2
torch.ops.dflash2.fill_attention_mask(torch.ones(4, dtype=torch.int32), 32, 8, 512)
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    run("-c", code, cwd=ROOT)


def test_using_the_operators_in_a_child_forked_after_the_parent_did():
    code = """
import os, torch, torch_dflash2
mask = torch.ops.dflash2.fill_attention_mask(torch.ones(1, dtype=torch.int32), 1, 2, 4)
child = os.fork()
assert torch.equal(torch.ops.dflash2.fill_attention_mask(torch.ones(1, dtype=torch.int32), 1, 2, 4), mask)
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    run("-c", code, cwd=ROOT)


def test_a_library_for_another_torch_is_explained(tmp_path):
    for path in (ROOT / "torch_dflash2").glob("*.py"):
        (tmp_path / "torch_dflash2").mkdir(exist_ok=True)
        (tmp_path / "torch_dflash2" / path.name).write_text(path.read_text())
    (tmp_path / "torch_dflash2/_C.so").write_bytes(b"not a library")
    code = "try:\n    import torch_dflash2\nexcept ImportError as e:\n    print(e)"
    out = run("-c", code, env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    assert f"built for another PyTorch than this one, {torch.__version__}" in out and "--no-build-isolation" in out


def test_public_names():
    for name in torch_dflash2.__all__:
        assert getattr(torch_dflash2, name) is not None
    assert set(torch_dflash2.__all__) <= set(dir(torch_dflash2))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = torch_dflash2.nothing


def test_the_readme_example_of_the_operators_runs():
    example = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert "pack_attention" in example and "commit_kv" in example
    names: dict = {}
    exec(example, names)
    assert names["out"].shape == (1, 8, 8, 128) and names["tokens"].tolist() == [3]


def test_devices_without_kernels_run_the_reference_and_its_options():
    """The path of CUDA tensors, taken by CPU tensors."""
    code = """
import torch, torch_dflash2
from torch_dflash2 import _library, reference
ops, lengths = torch.ops.dflash2, torch.tensor([3, 9], dtype=torch.int32)
want = {causal: ops.fill_attention_mask(lengths, 1, 3, 8, causal=causal) for causal in (False, True)}
plain, calls = reference.fill_attention_mask, []
reference.fill_attention_mask = lambda *args, **options: calls.append(options) or plain(*args, **options)
_library._register_reference("CPU")
assert torch.equal(ops.fill_attention_mask(lengths, 1, 3, 8), want[False])
for causal, mask in want.items():
    assert torch.equal(ops.fill_attention_mask(lengths, 1, 3, 8, causal=causal), mask)
    written = torch.empty_like(mask)
    ops.fill_attention_mask.out(lengths, 1, 3, 8, causal=causal, mask=written)
    assert torch.equal(written, mask)
assert [options.get("causal", False) for options in calls] == [False, False, False, True, True]
try:
    ops.fill_attention_mask(lengths, 1, 17, 32, causal=True)
except RuntimeError as error:
    print(error)
"""
    assert "rows: expected a number in 2..16, got 17" in run("-W", "ignore", "-c", code, cwd=ROOT)
