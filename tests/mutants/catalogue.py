"""Broken variants of the package: a textual change each, and the cases of the conformance suite that must see it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`old`, which stands once in gemattn/`file`, becomes `new`; one of `cases` (clause, case) must then fail."""

    name: str
    impl: str
    file: str
    old: str
    new: str
    cases: tuple[tuple[str, str], ...]
    gpu: bool = False


REFERENCE = "reference.py"
ATTENTION = "attention.py"
SCHEDULE = "kernels/schedule.py"
COMMON = "kernels/triton/common.py"
FORWARD = "kernels/triton/forward.py"
QUERY = "kernels/triton/query_gradient.py"
KEY = "kernels/triton/key_gradient.py"
LAUNCH = "kernels/triton/launch.py"


def _reference(name: str, old: str, new: str, *cases: tuple[str, str], file: str = REFERENCE) -> Mutant:
    return Mutant(f"reference: {name}", "reference", file, old, new, cases)


def _triton(name: str, file: str, old: str, new: str, *cases: tuple[str, str], gpu: bool = False) -> Mutant:
    return Mutant(f"triton: {name}", "triton", file, old, new, cases, gpu)


_REFERENCE_MUTANTS = [
    _reference(
        "causal aligned top-left",
        "position = i + (n_kv - n_q)",
        "position = i + 0 * (n_kv - n_q)",
        ("masks", "float32, cross, causal"),
    ),
    _reference(
        "left side one key too wide",
        "(position - spec.window_left).clamp(min=0)",
        "(position - spec.window_left - 1).clamp(min=0)",
        ("masks", "float32, self, left side"),
    ),
    _reference(
        "scale missing in dq",
        "t.ds @ t.k * spec.scale, t.ds.mT",
        "t.ds @ t.k, t.ds.mT",
        ("masks", "float32, self, full"),
    ),
    _reference(
        "lse in base 2",
        "stat = torch.logsumexp(scores, dim=-1, keepdim=True)",
        "stat = torch.logsumexp(scores, dim=-1, keepdim=True) * math.log2(math.e)",
        ("masks", "float32, self, full"),
    ),
    _reference(
        "slack of out not cleared",
        "out = query.new_zeros(rows,",
        "out = query.new_empty(rows,",
        ("slack_rows", "float32, self, full"),
    ),
    _reference(
        "padded rows read the tensor's first row",
        ".masked_fill(~mask[..., None, None], 0)",
        "",
        ("slack_rows", "float32, self, full"),
    ),
    _reference(
        "dlse forgotten",
        "if dlse is not None:\n        dp_centred",
        "if False:\n        dp_centred",
        ("one_incoming_gradient", "float32, cross, dlse"),
    ),
    _reference(
        "query heads grouped the wrong way",
        "rows.view(b, n, kv_heads, heads // kv_heads, d).permute(0, 2, 3, 1, 4)",
        "rows.view(b, n, heads // kv_heads, kv_heads, d).permute(0, 3, 2, 1, 4)",
        ("head_ratios", "float32, 6 / 2"),
    ),
    _reference(
        "gradients for rows that see no key are read",
        "do = _take(dout, group.out_index, group.seen, kv_heads)",
        "do = _take(dout, group.out_index, group.q_mask, kv_heads)",
        ("gradients_of_rows_that_see_no_key", "float32, cross"),
    ),
    _reference(
        "0 times a NaN key in dq of rows that see no key",
        "where = ((group.q_index, group.seen),",
        "where = ((group.q_index, group.q_mask),",
        ("rows_without_keys_beside_a_nan", "float32"),
    ),
    _reference(
        "probabilities from a rounded lse",
        "        p = torch.softmax(scores, dim=-1)\n        stat",
        "        p = torch.exp(scores - torch.logsumexp(scores, dim=-1, keepdim=True))\n        stat",
        ("equal_rows", "float32"),
    ),
    _reference(
        "shared query's gradient of the last group alone",
        "total.index_add_(0, index.flatten()[flat],",
        "total.index_copy_(0, index.flatten()[flat],",
        ("masks", "float32, shared, full"),
    ),
    _reference(
        "writes to its input",
        "    heads, kv_heads = query.shape[1], key.shape[1]\n    rows =",
        "    query.nan_to_num_(0)\n    heads, kv_heads = query.shape[1], key.shape[1]\n    rows =",
        ("no_input_is_mutated", "self"),
    ),
    _reference(
        "autocast to bfloat16 whatever was asked",
        "dtype = torch.get_autocast_dtype(device)",
        "dtype = torch.bfloat16",
        ("autocast", "float16"),
        file=ATTENTION,
    ),
    _reference(
        "float offsets let through",
        'raise TypeError(f"{name} is {offsets.dtype}, wanted int32 or int64")',
        "pass",
        ("wrong_arguments_are_named", ""),
        file=ATTENTION,
    ),
    _reference(
        "auto looks at the number of tokens",
        'if query.device.type == "cpu" or query.dtype',
        'if (query.device.type == "cpu" and query.shape[0] < 5000) or query.dtype',
        ("choice_is_not_of_the_batch", ""),
        file="dispatch.py",
    ),
    _reference(
        "counts hidden pairs as FLOPs",
        "spec = AttentionSpec(1.0, *window)",
        "spec = AttentionSpec(1.0)",
        ("flops", ""),
        file="flops.py",
    ),
]

_TRITON_MUTANTS = [
    _triton(
        "causal aligned top-left",
        COMMON,
        "sees = column < n_kv\n    shift = n_kv - n_q",
        "sees = column < n_kv\n    shift = 0",
        ("masks", "float32, cross, causal"),
    ),
    _triton(
        "last key of a causal tile skipped",
        COMMON,
        "end = tl.minimum(n_kv, tl.maximum(last_row + shift + window_right + 1, 0))",
        "end = tl.minimum(n_kv, tl.maximum(last_row + shift + window_right, 0))",
        ("masks", "float32, self, causal"),
    ),
    _triton(
        "first query block of a causal key tile skipped",
        COMMON,
        "begin = (tl.maximum(first_key - shift - window_right, 0) // BLOCK_M) * BLOCK_M",
        "begin = ((tl.maximum(first_key - shift - window_right, 0) + BLOCK_M - 1) // BLOCK_M) * BLOCK_M",
        ("masks", "float32, self, both sides"),
    ),
    _triton(
        "mask-free stretch one block too long",
        COMMON,
        "free_end = (all_see // BLOCK_N) * BLOCK_N",
        "free_end = ((all_see + BLOCK_N - 1) // BLOCK_N) * BLOCK_N",
        ("masks", "bfloat16, self, causal"),
    ),
    _triton(
        "first key block of a window skipped",
        COMMON,
        "begin = (tl.maximum(first_row + shift - window_left, 0) // BLOCK_N) * BLOCK_N",
        "begin = ((tl.maximum(first_row + shift - window_left, 0) + BLOCK_N - 1) // BLOCK_N) * BLOCK_N",
        ("masks", "float32, self, left side"),
    ),
    _triton(
        "rows without keys are divided by zero",
        COMMON,
        "first = tl.maximum(n_q - n_kv - window_right, 0)",
        "first = tl.minimum(n_q - n_kv - window_right, 0)",
        ("gradients_of_rows_that_see_no_key", "float32, cross"),
    ),
    _triton(
        "NaN swallowed by a minimum",
        COMMON,
        "x = tl.minimum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)",
        "x = tl.where(x < 0.0, x, 0.0)",
        ("isolation", "bfloat16, full, True"),
    ),
    _triton(
        "accumulates in bfloat16",
        COMMON,
        'total = tl.dot(a, b, acc, input_precision="tf32x3")',
        'total = tl.dot(a, b, acc, input_precision="tf32x3").to(tl.bfloat16).to(tl.float32)',
        ("gradients_accumulate_in_float32", "float16"),
    ),
    _triton(
        "neighbour's first row leaks",
        FORWARD,
        "inside = columns < n_kv",
        "inside = columns < n_kv + 1",
        ("isolation", "float32, full, True"),
    ),
    _triton(
        "lse in base 2",
        FORWARD,
        "(row_max + tl.log2(row_sum)) * LN2",
        "row_max + tl.log2(row_sum)",
        ("masks", "bfloat16, self, full"),
    ),
    _triton(
        "keys scaled in 16 bits before the product",
        FORWARD,
        "scores = product(q, tl.trans(k), EXACT) * score_scale",
        "scores = product(q, tl.trans((k * score_scale).to(k.dtype)), EXACT)",
        ("scores_are_scaled_in_float32", "float16, cross"),
    ),
    _triton(
        "unseen rows told by their sum",
        FORWARD,
        "out = tl.where(sees_key[:, None], acc",
        "out = tl.where((row_sum > 0.0)[:, None], acc",
        ("scores_that_are_all_minus_infinity", "float32"),
    ),
    _triton(
        "slack of out not cleared",
        FORWARD,
        "        store_tile(out_ptr, num_heads * HEAD_DIM, row_mask, zeros, BLOCK_M, HEAD_DIM, BLOCK_D)\n",
        "",
        ("slack_rows", "float32, self, full"),
    ),
    _triton(
        "every tile of a shared query reads its first rows",
        FORWARD,
        "q_row = first_row.to(tl.int64) if SHARED_QUERY else row",
        "q_row = (first_row * 0).to(tl.int64) if SHARED_QUERY else row",
        ("masks", "float32, shared, full"),
    ),
    _triton(
        "slack of dk not cleared",
        KEY,
        "        store_tile(dk_ptr + own, own_row_stride, column_mask, dk, BLOCK_N, HEAD_DIM, BLOCK_D)\n",
        "",
        ("slack_rows", "float32, self, full"),
    ),
    _triton(
        "scale missing in dk",
        KEY,
        "column_mask, dk * scale,",
        "column_mask, dk,",
        ("masks", "float32, self, full"),
    ),
    _triton(
        "dk of the wrong head group",
        KEY,
        "head = kv_head * group_size + member",
        "head = kv_head + member * num_kv_heads",
        ("head_ratios", "float32, 6 / 2"),
    ),
    _triton(
        "dk of the group's last head alone",
        KEY,
        "for member in tl.range(0, group_size):",
        "for member in tl.range(group_size - 1, group_size):",
        ("head_ratios", "float32, 4 / 1"),
    ),
    _triton(
        "probabilities of hidden pairs in dv",
        KEY,
        "                p = tl.where(sees, p, 0.0)\n",
        "",
        ("masks", "float32, self, causal"),
    ),
    _triton(
        "dlse forgotten in 16 bits",
        QUERY,
        "delta -= dlse",
        "delta -= 0.0 * dlse",
        ("one_incoming_gradient", "bfloat16, cross, dlse"),
    ),
    _triton(
        "0 times a NaN key in dq of rows that see no key",
        QUERY,
        "dq = tl.where(sees_key[:, None], dq * scale, 0.0)",
        "dq = dq * scale",
        ("rows_without_keys_beside_a_nan", "float32"),
    ),
    _triton(
        "dlse forgotten in dk of float32",
        LAUNCH,
        'HAS_DLSE=options["EXACT"] and dlse is not None',
        "HAS_DLSE=False",
        ("one_incoming_gradient", "float32, cross, dlse"),
    ),
    _triton(
        "one buffer for delta and norm",
        LAUNCH,
        "torch.empty((2 if _exact(query) else 1, *lse.shape)",
        "torch.empty((1, *lse.shape)",
        ("masks", "float32, self, full"),
    ),
    _triton(
        "shared query's gradient of one chunk alone",
        LAUNCH,
        "partial.sum(0)",
        "partial[0]",
        ("masks", "float32, shared, full"),
    ),
    _triton(
        "tiles of the forward pass by the number of rows",
        LAUNCH,
        'tile = configs.tile("forward", head_dim, query.element_size(), configs.family(query.device))',
        "tile = configs.Tile(64, 64 if rows < 50 else 16, 1, 1)",
        ("batch_invariance", "float32, cross, full"),
    ),
    _triton(
        "float32 taken for TF32",
        LAUNCH,
        "return query.dtype == torch.float32 and not _tf32_allowed()",
        "return False",
        ("equal_rows", "float32"),
    ),
    _triton(
        "strides taken for contiguous",
        LAUNCH,
        "return (x.stride(0) if rows > 1 else heads * head_dim, x.stride(1) if heads > 1 else head_dim)",
        "return heads * head_dim, head_dim",
        ("strides", "float32"),
    ),
    _triton(
        "offsets clamped and not made monotone",
        SCHEDULE,
        "clamp(0, rows).cummax(0).values",
        "clamp(0, rows)",
        ("corrupted_offsets", "float32, int64"),
    ),
    _triton(
        "schedules remembered by address",
        ATTENTION,
        "def _schedule_of(call: _Call) -> Schedule:\n    return make_schedule(",
        "_KEPT: dict[int, Schedule] = {}\n\n\ndef _schedule_of(call: _Call) -> Schedule:\n"
        "    return _KEPT.setdefault(call.kv_offsets.data_ptr(), _made(call))\n\n\n"
        "def _made(call: _Call) -> Schedule:\n    return make_schedule(",
        ("same_buffers_other_lengths", "self"),
    ),
    _triton(
        "a host sync",
        LAUNCH,
        "    lists = _schedule(query, key, q_offsets, kv_offsets, schedule, spec)\n    query, key, value = (",
        "    lists = _schedule(query, key, q_offsets, kv_offsets, schedule, spec)\n    lists.q_offsets.max().item()\n"
        "    query, key, value = (",
        ("no_host_sync", "self"),
        gpu=True,
    ),
    _triton(
        "views copied",
        LAUNCH,
        "return x if x.stride(-1) == 1 else x.contiguous()",
        "return x.contiguous()",
        ("no_copies", "False"),
        gpu=True,
    ),
]

MUTANTS = [*_REFERENCE_MUTANTS, *_TRITON_MUTANTS]
