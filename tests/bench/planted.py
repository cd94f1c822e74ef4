"""Providers with planted faults, named on the command line as NAME=tests.bench.planted:FUNCTION."""

import os

import torch

import gemattn


def right(query, key, value, q_offsets, kv_offsets=None, *, schedule=None, **options):
    """No fault."""
    return gemattn.jagged_attention(query, key, value, q_offsets, kv_offsets, impl="reference", **options)


def wrong_out(*args, **options):
    """1% too much."""
    return 1.01 * right(*args, **options)


def wrong_gradient(query, key, *args, **options):
    """Keys get a fifth too little gradient."""
    return right(query, 0.8 * key + 0.2 * key.detach(), *args, **options)


def nan_in_one_row(*args, **options):
    """NaN in a row that need not be sampled."""
    out = right(*args, **options)
    hole = torch.zeros_like(out)
    hole[out.shape[0] // 2] = torch.nan
    return out + hole


def too_short(*args, **options):
    """A row is missing."""
    return right(*args, **options)[1:]


def dies(*args, **options):
    """Takes its process with it."""
    os._exit(3)
