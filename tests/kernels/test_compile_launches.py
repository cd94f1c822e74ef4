"""What the TLX kernels' launches would compile, compiled ahead of time: what machine code must and must not hold."""

import json

import pytest

from tests.kernels.scripts import output_of

SHARED_MEMORY = 232_448  # bytes a block may have, on either chip
TENSOR_COLUMNS = 512
WITHOUT_DESCRIPTORS = {"prepare_kernel", "prepare_fused_kernel", "finish_kernel", "add_partials_kernel"}
ROLES = {"forward": {40, 104, 184}, "keys": {40, 104, 184}, "queries": {40, 168, 152}, "shared_query": {40, 168, 152}}
"""Blackwell's registers a thread: issuing warps, correction or writer, softmax or compute."""
SPILLED = {"forward": 48, "keys": 24, "queries": 16, "shared_query": 24}
"""Blackwell's bytes a thread, as recorded: outside of the loops over blocks but for a few words of the forward's."""
MASKED_FORWARD = 6
"""Local accesses of a masked loop of Hopper's forward with blocks of 128 keys, which runs once or twice a tile."""

pytestmark = pytest.mark.timeout(290)


def compile_launches(arch, head_dim, mask, dtype="bf16", kinds=("self", "shared")):
    what = ["--arch", str(arch), "--head-dim", str(head_dim), "--mask", mask, "--dtype", dtype, "--kind", *kinds]
    compiled = [json.loads(line) for line in output_of("compile_launches.py", *what, "--brief").splitlines()]
    for c in compiled:
        assert c["shared"] <= SHARED_MEMORY, c
        assert c["acquires"] or c["kernel"] in WITHOUT_DESCRIPTORS, c
    return compiled


@pytest.mark.parametrize(
    ("head_dim", "mask", "kinds"),
    [
        (128, "none", ("self", "shared")),
        (128, "both", ("self", "shared")),
        (64, "both", ("self", "shared")),
        (32, "both", ("self", "shared")),
    ],
)
def test_hopper(head_dim, mask, kinds):
    compiled = compile_launches(90, head_dim, mask, kinds=kinds)
    assert {c["target"] for c in compiled} == {"sm_90a"}
    kernels = [c for c in compiled if c["kernel"] not in WITHOUT_DESCRIPTORS and not c["kernel"].startswith("describe")]
    assert {c["kernel"] for c in kernels} == {"forward_kernel", "fused_gradient_kernel"} | (
        {"query_gradient_kernel", "key_gradient_kernel", "one_tile_gradient_kernel"} if "self" in kinds else set()
    )
    for c in kernels:
        assert c["wgmma"] > 0 and c["tma"] > 0 and c["setmaxnreg"], c
        if c["kernel"] == "one_tile_gradient_kernel":
            continue  # no loop over blocks
        # Loops over blocks; others branch back past a tile's end, where results leave by more stores than sums.
        loops = [x for x in c["loops"] if x["products"] and x["exponentials"] and x["tile_stores"] <= x["sums"]]
        assert (len(loops) >= 2 and len(loops) % 2 == 0) or (c["kernel"] == "fused_gradient_kernel" and loops), c
        forward = c["kernel"] == "forward_kernel"  # waits for its scores alone by intent
        spills = forward and mask != "none" and head_dim == 128 and c["constants"]["BLOCK_N"] == 128
        for loop in loops:
            # The waits that the kernels ask for, one for 4 matrix instructions or more. One after every product of
            # tiles comes from a software pipeliner that is not off; one after every instruction from want of registers.
            # Products over D 32 are two instructions where those over D 64 are four.
            fewest = (1.5 if forward else 2.5) if head_dim == 32 else (2 if forward else 4)
            assert loop["waits"] * fewest <= loop["products"], c
            assert loop["local"] <= (MASKED_FORWARD if spills else 0), c
        assert not spills or min(x["local"] for x in loops) == 0, c


def name(c):
    """A Blackwell kernel by what it computes."""
    if c["kernel"] == "forward_kernel":
        return "forward"
    return "keys" if c["constants"]["KEYS"] else "shared_query" if c["constants"]["SHARED"] else "queries"


@pytest.mark.parametrize(
    ("head_dim", "mask", "dtype"),
    [(128, "none", "bf16"), (128, "both", "bf16"), (64, "both", "bf16"), (64, "causal", "fp16")],
)
def test_blackwell(head_dim, mask, dtype):
    compiled = compile_launches(100, head_dim, mask, dtype)
    assert {c["target"] for c in compiled} == {"sm_100a"}
    kernels = [c for c in compiled if c["kernel"] in ("forward_kernel", "gradient_kernel")]
    assert sorted(map(name, kernels)) == ["forward", "keys", "queries", "shared_query"]
    for c in kernels:
        assert c["tcgen05.mma"] > 0 and c["tma"] > 0, c
        assert c["tensor_columns"] <= TENSOR_COLUMNS, c
        assert set(c["setmaxnreg"]) >= ROLES[name(c)], c
        assert c["stack"] <= SPILLED[name(c)], c
        issuing = [loop for loop in c["loops"] if loop["products"]]
        computing = [loop for loop in c["loops"] if loop["exponentials"]]
        assert issuing and computing, c
        assert all(loop["local"] == 0 for loop in issuing), c
        # Half the forward's loops over blocks are the masked ones, which run once or twice a tile.
        clean = sum(loop["local"] == 0 for loop in computing)
        assert clean >= (2 if name(c) == "forward" else len(computing)), c
