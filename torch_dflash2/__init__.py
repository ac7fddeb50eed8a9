"""Attention kernels for DFlash 2 speculative decoding, as PyTorch operators: `torch.ops.dflash2`.

On `mps` they are Metal kernels, on `cpu` C++, on other devices plain PyTorch (`torch_dflash2.reference`); Meta kernels
serve `torch.compile`. Built on them: `RingKVCache`, `DFlash2DraftModel` and `generate`.
"""

import importlib

from . import reference
from ._library import MetalAvailability, is_metal_available

__version__ = "0.1.0"

_LAZY = {
    "RingKVCache": "cache",
    "DFlashDraftModel": "drafter",
    "DFlash2DraftModel": "drafter",
    "generate": "decoding",
    "greedy_generate": "decoding",
    "Sampling": "sampling",
    "Session": "session",
}

__all__ = ["MetalAvailability", "is_metal_available", "reference", *_LAZY]


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
