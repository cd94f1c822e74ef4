import pytest

from gemattn.bench.__main__ import main
from gemattn.bench.floor import GPUS, Ceilings
from gemattn.bench.shapes import Work, by_name, select

# Floors of the rows measured on an H200 on 2026-12-01, worked out then from 4.24 TB/s and 724 TFLOP/s: B, H, D and
# milliseconds forward and backward, to two places.
PUBLISHED = [
    ("self_half_256", (1152, 4, 128), 0.14, 0.28),
    ("self_full_256", (1152, 4, 128), 0.29, 0.57),
    ("self_half_512", (1152, 4, 128), 0.28, 0.69),
    ("self_full_512", (1152, 4, 128), 0.85, 2.14),
    ("self_half_1024", (1152, 4, 128), 1.15, 2.86),
    ("self_full_1024", (1152, 4, 128), 3.42, 8.54),
    ("self_half_2048", (1152, 4, 128), 4.60, 11.49),
    ("self_full_2048", (1152, 4, 128), 13.67, 34.17),
    ("cross_q512_kv256", (1152, 4, 128), 0.43, 1.07),
    ("cross_q2048_kv256", (1152, 4, 128), 1.71, 4.27),
    ("pma_q32_kv2048half", (1152, 4, 128), 0.59, 1.18),
    ("self_logn_2048", (1152, 4, 128), 0.94, 2.35),
    ("self_logn_2048_causal", (1152, 4, 128), 0.47, 1.17),
    ("self_half_1024_causal", (1152, 4, 128), 0.57, 1.43),
    ("self_half_1024_d64", (1152, 8, 64), 1.15, 2.86),
    ("self_half_200_d64", (4096, 4, 64), 0.20, 0.40),
    ("self_half_200_d32", (4096, 4, 32), 0.10, 0.20),
    ("hsp_q256_kv512_s0.1", (1024, 4, 128), 0.09, 0.18),
    ("hsp_q256_kv512_s0.5", (1024, 4, 128), 0.19, 0.47),
    ("hsp_q256_kv512_s0.95", (1024, 4, 128), 0.36, 0.90),
    ("hsp_q256_kv1024_s0.1", (1024, 4, 128), 0.12, 0.23),
    ("hsp_q256_kv1024_s0.5", (1024, 4, 128), 0.38, 0.96),
    ("hsp_q256_kv1024_s0.95", (1024, 4, 128), 0.72, 1.80),
    ("hsp_q256_kv2048_s0.1", (1024, 4, 128), 0.17, 0.38),
    ("hsp_q256_kv2048_s0.5", (1024, 4, 128), 0.77, 1.92),
    ("hsp_q256_kv2048_s0.95", (1024, 4, 128), 1.44, 3.61),
    ("hsp_q256_kv4096_s0.1", (1024, 4, 128), 0.31, 0.77),
    ("hsp_q256_kv4096_s0.5", (1024, 4, 128), 1.51, 3.79),
    ("hsp_q256_kv4096_s0.95", (1024, 4, 128), 2.89, 7.21),
    ("hsp_q64_kv1024_s0.5", (1024, 4, 128), 0.27, 0.55),
]


@pytest.mark.parametrize(("name", "size", "forward", "backward"), PUBLISHED, ids=lambda value: str(value))
def test_floor_agrees_with_the_published_table(name, size, forward, backward):
    shape = by_name(name)
    assert (shape.sequences, shape.heads, shape.head_dim) == size
    assert GPUS["h200-hot"].forward_ms(shape.work) == pytest.approx(forward, abs=0.00501)
    assert GPUS["h200-hot"].backward_ms(shape.work) == pytest.approx(backward, abs=0.00501)


def test_the_table_is_the_two_suites():
    assert {name for name, *_ in PUBLISHED} == {shape.name for shape in select("hsp,self")}


def test_floor_is_the_larger_of_two_times():
    ceilings = Ceilings(copy_tb_s=2.0, matrix_tflop_s=100.0, source="")
    bytes_bound = Work(0, 0, 0, 10**9, 10**9, 4 * 10**9, 8 * 10**9)
    assert ceilings.forward_ms(bytes_bound) == pytest.approx(2.0)  # 4 GB at 2 TB/s
    assert ceilings.backward_ms(bytes_bound) == pytest.approx(4.0)
    flops_bound = Work(0, 0, 0, 10**12, 25 * 10**11, 10, 20)
    assert ceilings.forward_ms(flops_bound) == pytest.approx(10.0)  # 1 TFLOP at 100 TFLOP/s
    assert ceilings.backward_ms(flops_bound) == pytest.approx(25.0)


def test_command_for_a_card_that_is_not_here(capsys):
    assert main(["floor", "--gpu", "b200", "--shapes", "self_full_2048"]) == 0
    text = capsys.readouterr().out
    assert "arithmetic, not measurement" in text
    assert "8 TB/s, 2,250 TFLOP/s" in text
    # 4 * 4 * 128 * 1152 * 2048^2 FLOPs = 9.895 TFLOP; over 2,250 TFLOP/s 4.398 ms, backward 2.5 times that.
    row = next(line for line in text.splitlines() if "self_full_2048" in line)
    assert [cell.strip() for cell in row.split("|")][4:8] == ["9.896", "4.398", "10.995", "FLOPs / FLOPs"]


def test_command_takes_other_rates(capsys):
    main(["floor", "--gpu", "h200", "--matrix-tflop-s", "724", "--shapes", "self_full_2048"])
    text = capsys.readouterr().out
    assert "given on the command line: 4.8 TB/s, 724 TFLOP/s" in text
    assert " 13.668 | 34.170 " in text
