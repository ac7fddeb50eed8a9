from pathlib import Path

import pytest
import torch

import metal_sim

metal_sim.load()


@pytest.fixture(scope="session", autouse=True)
def probe():
    """Loads torch.ops.probe."""
    torch.ops.load_library(metal_sim.build_extension([Path(__file__).parent / "probe.mm"], name="probe"))


@pytest.fixture(autouse=True)
def clean_stream():
    yield
    metal_sim.reset()
