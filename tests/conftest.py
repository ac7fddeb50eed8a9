"""Every device that the tests run on: `cpu`, and `mps`, which is real on a Mac and simulated on Linux."""

import os
import pathlib
import runpy
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "torch_dflash2"
# The Metal path's sources: the package's own, unmodified, unless mutants.py asks for others.
METAL_PATH = pathlib.Path(os.environ.get("DFLASH2_METAL_PATH", PACKAGE))

if METAL_PATH != PACKAGE:
    from hypothesis import Phase, settings

    settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate])  # that it fails is all there is to know
    settings.load_profile("mutants")

if sys.platform == "linux":
    import metal_sim

    metal_sim.load()  # before anything asks torch about mps
    embed = runpy.run_path(str(METAL_PATH / "shaders/embed.py"))["embed"]
    torch.ops.load_library(
        metal_sim.build_extension(
            [METAL_PATH / "csrc/mps.mm", PACKAGE / "csrc/geometry.cpp"],
            include_dirs=[embed(ROOT / "build/shaders" if METAL_PATH == PACKAGE else METAL_PATH)],
            name="dflash2_mps",
        )
    )

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
