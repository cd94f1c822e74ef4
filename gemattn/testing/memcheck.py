"""Corrupted offsets, unchecked, forward and backward under every option: for a memory checker to watch. On a GPU host::

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \\
        python -m gemattn.testing.memcheck --impl triton

Without PyTorch's caching every tensor is an allocation of its own, so an access one byte outside is seen. The results
are compared with those of the mended offsets as well.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from dataclasses import replace

import torch

from gemattn.testing.conformance.runner import cannot_run, default_device, use_interpreter
from gemattn.testing.conformance.subject import DTYPES, MASKS, Subject

ROWS = 300
CORRUPTED = (
    [-5, 200, 100, 1000, 300],
    [0, 2**31 - 1, -1, 7, 299],
    [301, 302, 303, 304, 305],
    [-9, -8, -7, -6, -5],
    [0, 128, 301, 129, 128],
)
"""Offsets of four sequences that `ROWS` rows cannot have."""


def cases(subject: Subject) -> list[tuple[str, torch.dtype, str, list[int]]]:
    """(kind, dtype, mask, offsets) of every call; those that the implementation cannot take are left out."""
    dtypes = [x for x in DTYPES if subject.name != "tlx" or x != torch.float32]
    return list(itertools.product(("self", "cross", "shared"), dtypes, MASKS, CORRUPTED))


def run_case(subject: Subject, kind: str, dtype: torch.dtype, mask: str, values: list[int]) -> None:
    """Forward and backward with corrupted offsets; AssertionError where they differ from those of the mended ones."""
    lengths = [ROWS, 0, 0, 0]
    q_lengths = None if kind == "shared" else lengths
    shared_rows = 40 if kind == "shared" else None
    inputs = subject.inputs(q_lengths, None if kind == "self" else lengths, shared_rows=shared_rows, dtype=dtype)
    bad = torch.tensor(values, device=subject.device)
    good = bad.clamp(0, ROWS).cummax(0).values
    results = []
    for offsets in (bad, good):
        q_offsets = {"self": offsets, "cross": inputs.q_offsets, "shared": None}[kind]
        results.append(subject.run(replace(inputs, q_offsets=q_offsets, kv_offsets=offsets), **MASKS[mask]))
    subject.assert_all_same(results[0], results[1], f"{kind}, {dtype}, {mask}, offsets {values}")


def main(arguments: list[str] | None = None) -> int:
    """Run them all and say how many."""
    parser = argparse.ArgumentParser(prog="python -m gemattn.testing.memcheck", description=__doc__)
    parser.add_argument("--impl", choices=["triton", "tlx"], default="triton")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th case")
    options = parser.parse_args(arguments)
    os.environ.pop("GEMATTN_CHECK", None)
    if default_device() == "cpu":
        use_interpreter()
    subject = Subject(options.impl, default_device())
    if why := cannot_run(subject):
        print(f"not run here: {why}")
        return 2
    chosen = cases(subject)[:: options.every]
    for kind, dtype, mask, values in chosen:
        run_case(subject, kind, dtype, mask, values)
    if subject.on_gpu:
        torch.cuda.synchronize()
    print(f"{len(chosen)} cases of {options.impl} with corrupted offsets, forward and backward")
    return 0


if __name__ == "__main__":
    sys.exit(main())
