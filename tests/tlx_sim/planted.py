"""Small kernels for the simulator: right ones, and each wrong in one way that a constant switches on."""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gemattn.kernels.tlx._tlx import descriptor_slot, read_descriptor


@triton.jit
def copy_kernel(
    source, target, ROWS: tl.constexpr, STAGES: tl.constexpr, FAULT: tl.constexpr
):  # fmt: skip
    """A producer loads blocks of ROWS rows, a consumer stores twice their values; 64 columns of float32."""
    bufs = tlx.local_alloc((ROWS, 64), tl.float32, STAGES)
    staging = tlx.local_alloc((ROWS, 64), tl.float32, 1)
    full = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    free = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            for i in range(0, 6):
                buf = i % STAGES
                if FAULT != "no free wait":
                    tlx.barrier_wait(free[buf], (i // STAGES & 1) ^ 1)
                bytes_expected: tl.constexpr = ROWS * 64 * (2 if FAULT == "bytes" else 4)
                tlx.barrier_expect_bytes(full[buf], bytes_expected)
                slot = buf + STAGES if FAULT == "index" else buf
                tlx.async_descriptor_load(source, bufs[slot], [i * ROWS, 0], full[buf])
        with tlx.async_task(num_warps=4):
            for i in range(0, 6):
                buf = i % STAGES
                if FAULT != "no full wait":
                    tlx.barrier_wait(full[buf], i // STAGES & 1)
                x = tlx.local_load(bufs[buf])
                if FAULT != "no free arrive":
                    tlx.barrier_arrive(free[buf], 2 if FAULT == "over-arrival" else 1)
                if FAULT != "no store wait":
                    tlx.async_descriptor_store_wait(0)
                tlx.local_store(staging[0], x * 2)
                if FAULT != "no fence":
                    tlx.fence("async_shared")
                tlx.async_descriptor_store(target, staging[0], [i * ROWS, 0])
            tlx.async_descriptor_store_wait(0)


@triton.jit
def alias_kernel(a_desc, b_desc, out_ptr, peak_ptr, WAIT: tl.constexpr):
    """Scores of one product are read while the next product writes an alias of them, unless it waits."""
    a = tlx.local_alloc((128, 64), tl.bfloat16, 1)
    b = tlx.local_alloc((64, 64), tl.bfloat16, 1)
    loaded = tlx.alloc_barriers(1)
    spec = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    scores = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem, reuse=spec)
    grads = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem, reuse=spec)
    spec.set_buffer_overlap(tlx.reuse_group(scores, grads, group_type=tlx.reuse_group_type.shared))
    scores_full = tlx.alloc_barriers(1)
    scores_read = tlx.alloc_barriers(1)
    grads_full = tlx.alloc_barriers(1)
    rows = tl.arange(0, 128)[:, None]
    columns = tl.arange(0, 64)[None, :]
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_wait(scores_full[0], 0)
            s = tlx.local_load(scores[0])
            tlx.barrier_arrive(scores_read[0])
            tl.store(peak_ptr + rows * 64 + columns, s)
            tlx.barrier_wait(grads_full[0], 0)
            tl.store(out_ptr + rows * 64 + columns, tlx.local_load(grads[0]))
        with tlx.async_task(num_warps=1):
            tlx.barrier_wait(loaded[0], 0)
            tlx.async_dot(a[0], tlx.local_trans(b[0]), scores[0], use_acc=False, mBarriers=[scores_full[0]])
            if WAIT:
                tlx.barrier_wait(scores_read[0], 0)
            tlx.async_dot(a[0], b[0], grads[0], use_acc=False, mBarriers=[grads_full[0]])
        with tlx.async_task(num_warps=1):
            tlx.barrier_expect_bytes(loaded[0], (128 + 64) * 64 * 2)
            tlx.async_descriptor_load(a_desc, a[0], [0, 0], loaded[0])
            tlx.async_descriptor_load(b_desc, b[0], [0, 0], loaded[0])


@triton.jit
def warps_kernel(out_ptr, MEET: tl.constexpr):
    """Eight warps of one task read scores and write an alias of another layout over them."""
    spec = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    scores = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem, reuse=spec)
    p = tlx.local_alloc((128, 64), tl.bfloat16, 1, tlx.storage_kind.tmem, reuse=spec)
    spec.set_buffer_overlap(tlx.reuse_group(scores, p, group_type=tlx.reuse_group_type.shared))
    tlx.local_store(scores[0], tl.full([128, 64], 1.5, tl.float32))
    s = tlx.local_load(scores[0])
    if MEET:
        tlx.named_barrier_wait(10, 256)
    tlx.local_store(p[0], s.to(tl.bfloat16))
    x = tlx.local_load(p[0]).to(tl.float32)
    tl.store(out_ptr + tl.arange(0, 128)[:, None] * 64 + tl.arange(0, 64)[None, :], x)


@triton.jit
def exchange_kernel(k_desc, out_ptr, EARLY: tl.constexpr, BLOCKS: tl.constexpr):
    """Two consumers write half of dS each, and each multiplies both halves; EARLY says so before the products end."""
    k = tlx.local_alloc((64, 64), tl.bfloat16, 1)
    ds = tlx.local_alloc((64, 64), tl.bfloat16, 2)
    loaded = tlx.alloc_barriers(1)
    ds_full = tlx.alloc_barriers(num_barriers=1, arrive_count=2)
    ds_free = tlx.alloc_barriers(num_barriers=1, arrive_count=2)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_expect_bytes(loaded[0], 64 * 64 * 2)
            tlx.async_descriptor_load(k_desc, k[0], [0, 0], loaded[0])
        with tlx.async_task(num_warps=4, replicate=2):
            half: tl.constexpr = tlx.async_task_replica_id()
            tlx.barrier_wait(loaded[0], 0)
            acc = tl.zeros([64, 64], tl.float32)
            for block in range(0, BLOCKS):
                tlx.barrier_wait(ds_free[0], (block & 1) ^ 1)
                tlx.local_store(ds[half], tl.full([64, 64], 1.0, tl.float32).to(tl.bfloat16) * (block + half + 1))
                tlx.fence("async_shared")
                tlx.barrier_arrive(ds_full[0], 1)
                tlx.barrier_wait(ds_full[0], block & 1)
                acc = tlx.async_dot(ds[0], k[0], acc)
                acc = tlx.async_dot(ds[1], k[0], acc)
                if EARLY:
                    tlx.barrier_arrive(ds_free[0], 1)
                acc = tlx.async_dot_wait(0, acc)
                if not EARLY:
                    tlx.barrier_arrive(ds_free[0], 1)
            rows = half * 64 + tl.arange(0, 64)
            tl.store(out_ptr + rows[:, None] * 64 + tl.arange(0, 64)[None, :], acc)


@triton.jit
def misuse_kernel(desc, out_ptr, FAULT: tl.constexpr):
    """What one task alone can do wrong."""
    offsets = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    x = tlx.local_alloc((64, 64), tl.bfloat16, 1)
    full = tlx.alloc_barriers(1)
    if FAULT == "uninitialised":
        tl.store(out_ptr + offsets, tlx.local_load(x[0]).to(tl.float32))
    if FAULT == "capacity":
        tlx.local_alloc((256, 256), tl.bfloat16, 2)
    if FAULT == "pending":
        tlx.barrier_expect_bytes(full[0], 64 * 64 * 2)
        tlx.async_descriptor_load(desc, x[0], [0, 0], full[0])
        tlx.barrier_wait(full[0], 0)
        tl.store(out_ptr + offsets, tlx.async_dot(x[0], x[0]) * 2)
        tlx.async_dot_wait(0, tl.zeros([64, 64], tl.float32))
    if FAULT == "outside":
        tl.store(out_ptr + offsets + 1, tl.zeros([64, 64], tl.float32))
    if FAULT == "named barrier":
        tlx.named_barrier_wait(9, 64)
    if FAULT == "leaves stores":
        tlx.local_store(x[0], tl.zeros([64, 64], tl.bfloat16))
        tlx.fence("async_shared")
        tlx.async_descriptor_store(desc, x[0], [0, 0])


@triton.jit
def pair_kernel(out_ptr, FENCE: tl.constexpr, SYNC: tl.constexpr):
    """Two programs of a cluster swap 64 numbers through each other's shared memory."""
    mine = tlx.local_alloc((64,), tl.float32, 1)
    theirs = tlx.local_alloc((64,), tl.float32, 1)
    come = tlx.alloc_barriers(1)
    tlx.fence_mbarrier_init_cluster()
    tlx.cluster_barrier()
    rank = tlx.cluster_cta_rank()
    tlx.local_store(mine[0], tl.arange(0, 64).to(tl.float32) + 100 * rank)
    if FENCE:
        tlx.fence("async_shared")
    tlx.barrier_expect_bytes(come[0], 64 * 4)
    tlx.async_remote_shmem_copy(dst=theirs[0], src=mine[0], remote_cta_rank=1 - rank, barrier=come[0])
    if SYNC:
        tlx.barrier_wait(come[0], 0)
    tl.store(out_ptr + 64 * rank + tl.arange(0, 64), tlx.local_load(theirs[0]))
    tlx.cluster_barrier()


@triton.jit
def overtaking_kernel(target, WAIT: tl.constexpr):
    """Ones are stored, then ones are added at the same place; without a wait either may reach memory first."""
    bufs = tlx.local_alloc((16, 64), tl.float32, 1)
    tlx.local_store(bufs[0], tl.full([16, 64], 1.0, tl.float32))
    tlx.fence("async_shared")
    tlx.async_descriptor_store(target, bufs[0], [0, 0])
    tlx.async_descriptor_store_wait(0)  # the store has read its buffer, no more
    if WAIT:
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; mov.b32 $0, 0;", "=r,r", [tl.program_id(0)], tl.int32, is_pure=False, pack=1
        )
    tlx.async_descriptor_store(target, bufs[0], [0, 0], store_reduce="add")
    tlx.async_descriptor_store_wait(0)


@triton.jit
def write_table_kernel(table, source):
    """A descriptor of `source` (16 x 64 float32) in a table."""
    tlx.make_tensor_descriptor(
        desc_ptr=descriptor_slot(table, 0), base=source, shape=[16, 64], strides=[64, 1], block_shape=[16, 64]
    )


@triton.jit
def read_table_kernel(table, out_ptr, ACQUIRE: tl.constexpr):
    """Loads by the descriptor that an earlier kernel wrote."""
    bufs = tlx.local_alloc((16, 64), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    if ACQUIRE:
        desc = read_descriptor(table, 0, [16, 64], tl.float32)
    else:
        desc = tlx.reinterpret_tensor_descriptor(descriptor_slot(table, 0), [16, 64], tl.float32)
    tlx.barrier_expect_bytes(full[0], 16 * 64 * 4)
    tlx.async_descriptor_load(desc, bufs[0], [0, 0], full[0])
    tlx.barrier_wait(full[0], 0)
    tl.store(out_ptr + tl.arange(0, 16)[:, None] * 64 + tl.arange(0, 64)[None, :], tlx.local_load(bufs[0]))
