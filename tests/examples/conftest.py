"""What the tests of the examples share: the real data where they can be had, and a world of one process."""

from pathlib import Path

import pytest

pytest.importorskip("torchrec")

import torch.distributed as dist

from examples.data import movielens

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def ml_100k_dir() -> Path:
    """The data folder with MovieLens-100K in it; skips, with the reason, where it cannot be fetched."""
    try:
        movielens.fetch(ROOT / "data")
    except movielens.DataError as error:
        pytest.skip(str(error))
    return ROOT / "data"


@pytest.fixture(scope="session")
def ml_100k(ml_100k_dir):
    return movielens.load(ml_100k_dir)


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()
