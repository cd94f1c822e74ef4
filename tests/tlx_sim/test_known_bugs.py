"""Two bugs that hardware has shown: each is caught under every schedule, and its mended form passes."""

import pytest
import torch

tlx_sim = pytest.importorskip("gemattn.testing.tlx_sim", reason="needs fbtriton", exc_type=ImportError)

from tests.tlx_sim import planted  # noqa: E402
from tests.tlx_sim.test_findings import describe  # noqa: E402

SEEDS = range(5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("wait", [True, False])
def test_an_alias_in_tensor_memory_is_written_while_another_warp_group_reads(wait, seed):
    a, b = torch.randn(128, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    out, peak = torch.zeros(128, 64), torch.zeros(128, 64)
    with tlx_sim.simulate(100, seed) as run:
        planted.alias_kernel[(1,)](describe(a, 128), describe(b, 64), out, peak, wait, num_warps=4)
    if wait:
        assert run.report.ok, str(run.report)
        torch.testing.assert_close(out, a.float() @ b.float())
        torch.testing.assert_close(peak, a.float() @ b.float().T)
    else:
        text = str(run.report.races)
        assert "read of scores[0]" in text and "write of grads[0]" in text


@pytest.mark.parametrize("meet", [True, False])
def test_warps_of_one_task_overwrite_what_others_read(meet):
    out = torch.zeros(128, 64)
    with tlx_sim.simulate(100) as run:
        planted.warps_kernel[(1,)](out, meet, num_warps=8)
    assert [x.kind for x in run.report.findings] == ([] if meet else ["race between warps"])
    assert out.eq(1.5).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("early", [False, True])
def test_a_consumer_overwrites_ds_while_the_other_multiplies_it(early, seed):
    k, out = torch.randn(64, 64).bfloat16(), torch.zeros(128, 64)
    blocks = 3
    with tlx_sim.simulate(90, seed) as run:
        planted.exchange_kernel[(1,)](describe(k, 64), out, early, blocks, num_warps=4)
    if early:
        assert any("ds[" in str(x) and "async_dot" in str(x) for x in run.report.races), str(run.report)
    else:
        assert run.report.ok, str(run.report)
        factor = sum(2 * block + 3 for block in range(blocks))
        torch.testing.assert_close(out[:64], factor * k.float().sum(0).expand(64, 64))
