"""Loads the operators, and knows which path each device takes."""

import pathlib
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from . import reference

NAMES = ("pack_attention", "fill_attention_mask", "commit_kv", "set_mask_rows")
_HERE = pathlib.Path(__file__).parent

try:
    torch.ops.load_library(_HERE / "_C.so")
except OSError as error:
    raise ImportError(
        f"torch_dflash2 was built for another PyTorch than this one, {torch.__version__}, or was not built at all. "
        "Build it for this one: pip install --no-build-isolation --force-reinstall --no-deps torch_dflash2 (or . in a clone)"
    ) from error


@dataclass(frozen=True)
class MetalAvailability:
    """True if operators on `mps` tensors run as Metal kernels; otherwise `reason` says why they do not."""

    available: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.available

    def __str__(self) -> str:
        return "available" if self.available else f"not available: {self.reason}"


def is_metal_available() -> MetalAvailability:
    """Whether operators on `mps` tensors run as Metal kernels here; falsy, with a `.reason`, if they do not."""
    if not torch.backends.mps.is_built():
        return MetalAvailability(False, "this PyTorch was built without MPS")
    if not torch.backends.mps.is_available():
        return MetalAvailability(False, "PyTorch finds no MPS device on this machine")
    if not _has_metal_kernels:
        return MetalAvailability(False, "torch_dflash2 was built without its Metal path; reinstall it on macOS 14 or newer")
    return MetalAvailability(True)


def _register_missing_metal() -> None:
    """Operators on `mps` tensors raise with the reason; they never fall back to plain PyTorch in silence."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError(f"dflash2 operators cannot run on mps: {is_metal_available().reason}")

    for name in (*NAMES, "pack_attention.out", "fill_attention_mask.out"):
        _registrations.impl(name, refuse, "MPS")


def _register_reference(device_key: str) -> None:
    """Operators on devices without kernels of their own run `reference`, behind the same checks."""

    def check(op, args, kwargs) -> None:
        with FakeTensorMode() as fake:
            faked = lambda a: fake.from_tensor(a) if isinstance(a, torch.Tensor) else a  # noqa: E731
            op(*map(faked, args), **{name: faked(a) for name, a in kwargs.items()})

    def functional(name: str):
        op, plain = getattr(torch.ops.dflash2, name).default, getattr(reference, name)

        def run(*args, **options):
            check(op, args, options)
            return plain(*args, **options)

        return run

    def out(name: str):
        op, plain = getattr(torch.ops.dflash2, name).out, getattr(reference, name)

        def run(*args, **kwargs):
            check(op, args, kwargs)
            written = {name: a for name, a in kwargs.items() if isinstance(a, torch.Tensor)}
            results = plain(*args, **{name: a for name, a in kwargs.items() if name not in written})
            for tensor, result in zip(written.values(), results if isinstance(results, tuple) else (results,), strict=True):
                tensor.copy_(result)

        return run

    for name in NAMES:
        _registrations.impl(name, functional(name), device_key)
    for name in ("pack_attention", "fill_attention_mask"):
        _registrations.impl(f"{name}.out", out(name), device_key)


_registrations = torch.library.Library("dflash2", "IMPL")
_has_metal_kernels = torch._C._dispatch_has_kernel_for_dispatch_key("dflash2::pack_attention", "MPS")
if not _has_metal_kernels:
    _register_missing_metal()
_register_reference("CUDA")
