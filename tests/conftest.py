"""Every device that the tests run on: `cpu`, and `mps`, which is real on a Mac and simulated on Linux."""

import pathlib
import runpy
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "torch_dflash2"


def host_library(**options) -> pathlib.Path:
    """The package's Metal path, unmodified, built for the stand-in for a Mac."""
    import metal_sim

    embed = runpy.run_path(str(PACKAGE / "shaders/embed.py"))["embed"]
    return metal_sim.build_extension(
        [PACKAGE / "csrc/mps.mm", PACKAGE / "csrc/geometry.cpp"],
        include_dirs=[embed(ROOT / "build/shaders")],
        name="dflash2_mps",
        **options,
    )


if sys.platform == "linux":
    import metal_sim

    metal_sim.load()  # before anything asks torch about mps
    torch.ops.load_library(host_library())

import torch_dflash2  # noqa: E402

if not torch_dflash2.is_metal_available():
    raise RuntimeError(f"the tests need the Metal path, which is {torch_dflash2.is_metal_available()}")


@pytest.fixture(params=["cpu", "mps"], scope="session")
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def nothing_left_on_the_gpu():
    """A fault on the device belongs to the test that caused it."""
    yield
    torch.mps.synchronize()
