"""The words every implementation uses: what a call asks for, apart from its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Impl = Literal["auto", "reference", "triton", "tlx"]
IMPLS: tuple[str, ...] = get_args(Impl)

UNLIMITED = -1
"""Window side without a limit, as operators and kernels carry it."""
_WIDEST_WINDOW = 1 << 30
"""No sequence is longer: a wider window would only overflow kernels' 32-bit positions."""


@dataclass(frozen=True)
class AttentionSpec:
    """Options of one attention call, normalised.

    ``causal`` is folded into the window: it is a right side of 0. Row ``i`` of a sequence with ``n_q`` queries and
    ``n_kv`` keys sees the keys ``lo <= j < hi`` with ``shift = n_kv - n_q``::

        lo = 0    if window_left  == UNLIMITED else max(0, i + shift - window_left)
        hi = n_kv if window_right == UNLIMITED else min(n_kv, i + shift + window_right + 1)

    A row sees no key exactly when ``hi <= lo``: this is decided from lengths, never from scores.
    """

    scale: float
    window_left: int = UNLIMITED
    window_right: int = UNLIMITED
    shared_query: bool = False
    deterministic: bool = False

    @property
    def masked(self) -> bool:
        """Whether some key of a row's own sequence may be hidden from it."""
        return self.window_left != UNLIMITED or self.window_right != UNLIMITED

    @property
    def kernel_window(self) -> tuple[int, int]:
        """(left, right) as kernels take them."""
        return min(self.window_left, _WIDEST_WINDOW), min(self.window_right, _WIDEST_WINDOW)


def fold_window(causal: bool, window: tuple[int | None, int | None] | None) -> tuple[int, int]:
    """(window_left, window_right) of a causal flag and a window; both sides checked by the caller."""
    left, right = (None, None) if window is None else window
    if causal:
        right = 0  # a causal row never sees past its own position, whatever the window's right side
    return (UNLIMITED if left is None else left, UNLIMITED if right is None else right)
