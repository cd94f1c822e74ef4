import pytest
import torch

from gemattn.bench.shapes import SUITES, Lengths, Shape, by_name, count_work, select, visible_pairs


def test_suites_have_their_rows():
    assert {name: len(shapes) for name, shapes in SUITES.items() if name != "smoke"} == {
        "hsp": 13,
        "self": 17,
        "extra": 6,
    }
    names = [shape.name for shapes in SUITES.values() for shape in shapes]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("density", "limit", "bounds"),
    [(0.1, 512, (1, 102)), (0.1, 4096, (1, 819)), (0.5, 512, (1, 512)), (0.95, 512, (460, 512)), (1.0, 8, (8, 8))],
)
def test_bounds_of_density(density, limit, bounds):
    assert Lengths("density", limit, density).bounds() == bounds


def test_lengths_come_from_the_seed():
    """The first draws of PyTorch's CPU generator at seed 0, which no version has changed."""
    assert by_name("self_half_256").draw()[0][:5].tolist() == [173, 48, 118, 193, 68]
    assert by_name("hsp_q256_kv512_s0.95").draw()[1][:5].tolist() == [512, 492, 488, 481, 505]
    assert by_name("hsp_q256_kv512_s0.1").draw()[1][:5].tolist() == [93, 4, 30, 85, 20]
    assert by_name("self_logn_2048").draw()[0][:5].tolist() == [44, 42, 126, 101, 472]


def test_lengths_of_each_kind():
    generator = torch.Generator().manual_seed(0)
    half = Lengths("half", 7).draw(4000, generator)
    assert (half.min(), half.max()) == (1, 7)
    assert abs(half.double().mean() - 4) < 0.1
    lognormal = Lengths("lognormal", 2048).draw(100_000, generator).double()
    assert lognormal.min() >= 1 and lognormal.max() == 2048
    assert abs(lognormal.median() - 2048 / 12) < 3
    assert Lengths("giant", 100, rest=3).draw(4, generator).tolist() == [100, 3, 3, 3]
    assert Lengths("full", 9).draw(2, generator).tolist() == [9, 9]


def test_query_lengths_are_drawn_first():
    shape = Shape("two", "test", 3, 1, 16, query=Lengths("half", 100), key=Lengths("half", 50))
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randint(1, limit + 1, (3,), generator=generator).tolist() for limit in (100, 50))
    assert [lengths.tolist() for lengths in shape.draw()] == [query, key]


def test_self_attention_has_one_set_of_lengths():
    query, key = by_name("self_half_1024_causal").draw()
    assert torch.equal(query, key)


def test_pairs_by_hand():
    """Lengths 3 and 2: 9 + 4 pairs, causal 6 + 3; a window of 1 to the left and causal leaves 5 + 3."""
    lengths = torch.tensor([3, 2])
    assert visible_pairs(lengths, lengths) == 13
    assert visible_pairs(lengths, lengths, causal=True) == 9
    assert visible_pairs(lengths, lengths, causal=True, window=(1, None)) == 8
    assert visible_pairs(lengths, lengths, window=(1, 1)) == 7 + 4
    # Bottom-right: of 2 queries over 4 keys the first sees 3 keys; of 3 queries over 1 key only the last sees it.
    assert visible_pairs(torch.tensor([2, 3]), torch.tensor([4, 1]), causal=True) == 7 + 1


def test_work_by_hand():
    """2 heads of size 8, 1 key/value head, bfloat16. Query 5 rows of 32 bytes, keys 5 rows of 16 bytes."""
    shape = Shape("x", "test", 1, 2, 8, query=Lengths("full", 5), kv_heads=1)
    work = count_work(shape)
    assert (work.query_rows, work.key_rows, work.pairs) == (5, 5, 25)
    assert work.forward_flops == 4 * 2 * 8 * 25
    assert work.backward_flops == 10 * 2 * 8 * 25
    lse = 5 * 2 * 4
    assert work.forward_bytes == 5 * 32 + 2 * 5 * 16 + 5 * 32 + lse
    assert work.backward_bytes == 4 * 5 * 32 + 4 * 5 * 16 + lse


def test_work_of_a_shared_query_counts_it_once():
    shape = Shape("x", "test", 3, 1, 8, key=Lengths("full", 4), shared_rows=2)
    work = count_work(shape)
    assert (work.query_rows, work.key_rows, work.pairs) == (2, 12, 24)
    assert work.forward_bytes == 16 * (2 + 3 * 2 + 2 * 12) + 3 * 2 * 4


def test_work_of_dense_rows():
    assert by_name("cross_q512_kv256").work.pairs == 1152 * 512 * 256
    assert by_name("self_full_2048").work.forward_flops == 4 * 4 * 128 * 1152 * 2048**2
    giant = by_name("giant_65536_among_1023x64").work
    assert giant.pairs == 65536**2 + 1023 * 64**2


def test_select():
    assert [shape.name for shape in select("hsp", "kv512_s0.1,q64")] == ["hsp_q256_kv512_s0.1", "hsp_q64_kv1024_s0.5"]
    assert len(select("all")) == 36
    with pytest.raises(ValueError, match="suite is 'dense', wanted one of hsp, self"):
        select("dense")
    with pytest.raises(ValueError, match="no shape of suite hsp has 'causal'"):
        select("hsp", "causal")
