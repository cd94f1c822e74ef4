"""A process group of one process for the tests that shard a model."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def gloo(tmp_path):
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(tmp_path / "store"), 1),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=60),
    )
    yield torch.device("cpu")
    dist.destroy_process_group()
