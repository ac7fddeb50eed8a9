"""A stand-in for a Mac with a Metal GPU, for Linux. See README.md."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator
from typing import NamedTuple

from .build import BUILD, HERE, BuildError, build, build_extension

__all__ = [
    "BUILD",
    "BuildError",
    "Dispatch",
    "Trace",
    "Traffic",
    "build",
    "build_extension",
    "counted",
    "counters",
    "failing",
    "load",
    "options",
    "reset",
    "traced",
    "warnings",
]


def load() -> None:
    """Gives this process the device "mps"; builds what is not built. Call it before anything asks torch about MPS."""
    import torch

    folder = build()
    compiler = [sys.executable, "-I", "-S", str(HERE / "msl/compile.py")]
    os.environ["METAL_SIM_COMPILER"] = shlex.join(compiler)
    os.environ["METAL_SIM_CACHE"] = str(folder / "shaders")
    (folder / "shaders").mkdir(exist_ok=True)
    torch.ops.load_library(str(folder / "libtorch_mps_sim.so"))
    torch._C._has_mps = True  # type: ignore[attr-defined]


def _ops():
    import torch

    return torch.ops.metal_sim


def counters() -> dict[str, int]:
    """What host code has done so far, by name (runtime/sim.h lists the names), and how many objects live."""
    return dict(_ops().counters())


class Counts(dict[str, int]):
    """How much each counter grew within counted(); filled in at its end."""


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """with counted() as n: ...; assert n["dispatches"] == 1"""
    before, grown = counters(), Counts()
    yield grown
    grown.update({name: value - before[name] for name, value in counters().items()})


class Traffic(NamedTuple):
    """A kernel argument's memory traffic. One request is one instruction of up to 32 threads side by side."""

    requests: int
    bytes: int  # that the threads asked for
    sectors: int  # pieces of 32 bytes touched, counted for every request
    lines: int  # pieces of 128 bytes
    unique_sectors: int  # counted once a dispatch: what is left with a perfect cache
    unique_lines: int


class Dispatch(NamedTuple):
    kernel: str
    grid: tuple[int, ...]  # threads in all
    threadgroup: tuple[int, ...]


class Trace(NamedTuple):
    traffic: dict[str, Traffic]  # by "kernel/argument"
    dispatches: list[Dispatch]


@contextlib.contextmanager
def traced() -> Iterator[Trace]:
    """Records traffic and dispatches; the trace is filled in at the end, which waits for the device."""
    import torch

    torch.mps.synchronize()
    trace = Trace({}, [])
    with options(trace=1):
        yield trace
        torch.mps.synchronize()
    trace.traffic.update({name: Traffic(*numbers) for name, numbers in _ops().traffic().items()})
    for line in _ops().dispatches():
        kernel, *sizes = line.split()
        grid, threadgroup = (tuple(int(n) for n in size.split(",")) for size in sizes)
        trace.dispatches.append(Dispatch(kernel, grid, threadgroup))


@contextlib.contextmanager
def options(**values: int) -> Iterator[None]:
    """Changes settings for a while: validate, max_threads, checks, coverage, eager, trace (see runtime/sim.h)."""
    before = {name: _ops().set_option(name, value) for name, value in values.items()}
    try:
        yield
    finally:
        for name, value in before.items():
            _ops().set_option(name, value)


@contextlib.contextmanager
def failing(what: str, times: int = 2**63 - 1) -> Iterator[None]:
    """Makes requests for a device, library, function, pipeline, command_buffer or encoder fail."""
    _ops().fail_next(what, times)
    try:
        yield
    finally:
        _ops().fail_next(what, 0)


def warnings() -> list[str]:
    """The compiler's warnings about every shader library made so far."""
    return list(_ops().warnings())


def reset() -> None:
    """After a fault: forgets open encoders and commands that have not run, so that the next test starts clean."""
    _ops().reset()
