import math

import pytest
import torch

from gemattn.nn import apply_rotary, log_age, position_angles, time_angles


def test_is_a_rotation_of_pairs():
    torch.manual_seed(0)
    x, angles = torch.randn(5, 3, 8, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(apply_rotary(x, angles), torch.cat([pairs.real, pairs.imag], dim=-1))


def test_scores_depend_on_the_difference_of_positions_only():
    torch.manual_seed(0)
    q, k = (torch.randn(1, 1, 16, dtype=torch.float64).expand(40, 1, 16) for _ in range(2))
    angles = position_angles(torch.tensor([0, 40]), 40, 16)
    scores = (apply_rotary(q, angles) @ apply_rotary(k, angles).permute(1, 2, 0)[0]).squeeze(1)
    for distance in (-7, 0, 3):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-4)
    assert scores.diagonal(1)[0] != scores.diagonal(5)[0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_start_over_in_every_sequence(dtype):
    offsets = torch.tensor([0, 3, 3, 5], dtype=dtype)
    angles = position_angles(offsets, 7, 4, base=100.0)
    position = torch.tensor([0.0, 1, 2, 0, 1, 0, 1])  # the last two are slack
    torch.testing.assert_close(angles, torch.stack([position, position * 0.1], dim=1))
    assert position_angles(torch.zeros(1, dtype=dtype), 2, 4).shape == (2, 2)


def test_rounds_once():
    torch.manual_seed(0)
    x, angles = torch.randn(50, 2, 8).bfloat16(), torch.randn(50, 4)
    out = apply_rotary(x, angles)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, apply_rotary(x.float(), angles).bfloat16())


def test_time_angles_are_log_ages_times_frequencies():
    ages = torch.tensor([0.0, 60.0, 3600.0, 31536000.0])
    tau = torch.tensor([math.log(1 + age / 60) for age in ages.tolist()])
    torch.testing.assert_close(log_age(ages, 60), tau)
    angles = time_angles(ages, 8, 60, max_frequency=2.0, base=16.0)
    torch.testing.assert_close(angles, tau[:, None] * torch.tensor([2.0, 1.0, 0.5, 0.25]))
    assert log_age(torch.tensor([-5.0]), 60).item() == 0


def test_bad_input():
    with pytest.raises(ValueError, match="head_dim is 5, wanted an even number"):
        position_angles(torch.tensor([0, 2]), 2, 5)
    with pytest.raises(ValueError, match="time_scale is 0"):
        time_angles(torch.ones(3), 4, 0)
    with pytest.raises(ValueError, match=r"angles has shape \(3, 4\), wanted \(3, 2\)"):
        apply_rotary(torch.zeros(3, 1, 4), torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"age_seconds has shape \(3, 1\)"):
        time_angles(torch.ones(3, 1), 4, 60)
