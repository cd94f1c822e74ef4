"""What every test stands on: threads, Triton's interpreter, seeds, and skips that say why."""

import os
import random
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported; processes that tests start inherit it. Workers run side by side, one core each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch

# Before triton is imported: a kernel is compiled or interpreted from its definition on.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

try:
    from hypothesis import settings
except ImportError:
    pass
else:
    settings.register_profile("gemattn", deadline=None, derandomize=True)
    settings.load_profile("gemattn")


def _missing_for_compile() -> str | None:
    """What torch.compile's C++ backend lacks here, or None."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "needs a C++ compiler, found no g++"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "needs Python's headers, found no Python.h"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = None if torch.cuda.is_available() else "needs a CUDA GPU, found none"
    reasons = {"gpu": no_gpu, "compiler": _missing_for_compile()}
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seeds every generator before each test, so that a test gives the same result alone and in any order."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return 0


@pytest.fixture
def poison_empty() -> Iterator[None]:
    """Fills fresh floating-point tensors with NaN, so that a row that nobody wrote shows."""
    from gemattn.testing import poisoned_memory

    with poisoned_memory():
        yield
