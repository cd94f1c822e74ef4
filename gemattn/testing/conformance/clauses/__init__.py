"""The clauses, in the order of the contract; importing this registers them."""

from gemattn.testing.conformance.clauses import (  # noqa: I001
    empty,
    isolation,
    offsets,
    device,
    strides,
    sizes,
    invariance,
    gradients,
    citizenship,
)

__all__ = [
    "citizenship",
    "device",
    "empty",
    "gradients",
    "invariance",
    "isolation",
    "offsets",
    "sizes",
    "strides",
]
