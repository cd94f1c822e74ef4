"""Triton's interpreter, mended: bfloat16 is a number there, and products run."""

import operator

import pytest
import torch

from gemattn.kernels import interpreter

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.skipif(not interpreter.interpreting(), reason="Triton compiles for the GPU here")

interpreter.install()

SIZE = 64
NUMBERS = [0.0, -0.0, 1.0, -1.0, 1.5, 3.14159, -2.7e-3, 1e38, -1e38, 3.4e38, 1e-40, float("inf"), float("-inf")]


def values(seed=0, dtype=torch.float32):
    """SIZE numbers of every kind: ordinary ones, large, tiny, infinite, NaN, and ties between two bfloat16."""
    x = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))
    x[: len(NUMBERS)] = torch.tensor(NUMBERS)
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x3F817FFF, 0x7F7FFFFF, 0x7F800001], dtype=torch.int64)
    x[20:26] = bits.to(torch.int32).view(torch.float32)
    x[26] = float("nan")
    return x.to(dtype)


def assert_same(actual, expected):
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@triton.jit
def cast_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(y_ptr.dtype.element_ty))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.bfloat16),
    ],
)
def test_cast(source, target):
    x = values(dtype=source)
    y = torch.empty(SIZE, dtype=target)
    cast_kernel[(1,)](x, y, SIZE)
    assert_same(y, x.to(target))


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_cast_of_integers(integer):
    x = torch.arange(-32, 32) * 1001
    y = torch.empty(SIZE, dtype=torch.bfloat16)
    cast_kernel[(1,)](x.to(integer), y, SIZE)
    assert_same(y, x.to(torch.bfloat16))
    back = torch.empty(SIZE, dtype=integer)
    cast_kernel[(1,)](y, back, SIZE)
    assert_same(back, y.to(integer))


@triton.jit
def arithmetic_kernel(x_ptr, y_ptr, out_ptr, OP: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    x = tl.load(x_ptr + i)
    y = tl.load(y_ptr + i)
    if OP == "add":
        z = x + y
    elif OP == "sub":
        z = x - y
    elif OP == "mul":
        z = x * y
    elif OP == "neg":
        z = -x
    elif OP == "abs":
        z = tl.abs(x)
    elif OP == "lt":
        z = tl.where(x < y, x, y)
    elif OP == "const":
        z = x * 0.5 + tl.full([SIZE], 3.0, tl.bfloat16)
    tl.store(out_ptr + i, z.to(out_ptr.dtype.element_ty))


OPERATIONS = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": lambda x, y: -x,
    "abs": lambda x, y: x.abs(),
    "lt": lambda x, y: torch.where(x < y, x, y),
    "const": lambda x, y: x * 0.5 + 3.0,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_bfloat16_arithmetic(name):
    x, y = values(0, torch.bfloat16), values(1, torch.bfloat16).flip(0)
    out = torch.empty(SIZE, dtype=torch.bfloat16)
    arithmetic_kernel[(1,)](x, y, out, name, SIZE)
    assert_same(out, OPERATIONS[name](x, y))


@triton.jit
def reduce_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, SIZE))
    tl.store(out_ptr, tl.max(x, 0).to(tl.float32))
    tl.store(out_ptr + 1, tl.min(x, 0).to(tl.float32))
    tl.store(out_ptr + 2, tl.sum(x.to(tl.float32), 0))


def test_bfloat16_reductions():
    x = torch.randn(SIZE).to(torch.bfloat16)
    out = torch.empty(3)
    reduce_kernel[(1,)](x, out, SIZE)
    assert out[0] == x.max() and out[1] == x.min()
    torch.testing.assert_close(out[2], x.float().sum())


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m = tl.arange(0, M)[:, None]
    n = tl.arange(0, N)[None, :]
    a = tl.load(a_ptr + m * K + tl.arange(0, K)[None, :])
    b = tl.load(b_ptr + tl.arange(0, K)[:, None] * N + n)
    tl.store(c_ptr + m * N + n, tl.dot(a, b, input_precision="ieee").to(c_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dot(dtype):
    a, b = torch.randn(16, 32).to(dtype), torch.randn(32, 64).to(dtype)
    c = torch.empty(16, 64)
    dot_kernel[(1,)](a, b, c, 16, 64, 32)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-5, atol=1e-5)
    rounded = torch.empty(16, 64, dtype=dtype)
    dot_kernel[(1,)](a, b, rounded, 16, 64, 32)
    assert_same(rounded, c.to(dtype))


@triton.jit
def loop_kernel(n_ptr, out_ptr):
    total = 0.0
    for i in tl.range(0, tl.load(n_ptr)):
        total += i
    tl.store(out_ptr, total)


def test_loop_over_a_loaded_bound():
    out = torch.empty(1)
    loop_kernel[(1,)](torch.tensor([5]), out)
    assert out.item() == 10


def test_install_twice_changes_nothing():
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

    before = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl, InterpretedFunction.__call__
    interpreter.install()
    assert before == (InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl, InterpretedFunction.__call__)
