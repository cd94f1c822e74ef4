"""Who is compared, and how each is named on the command line.

==================  ===================================================================================================
tlx, triton         gemattn's kernels; `reference` is its eager one
fa4                 FlashAttention-4 as installed; `fa4=FOLDER`, `NAME=FOLDER` a copy of it in a folder
varlen              torch varlen_attn with the FlashAttention-2 of PyTorch; varlen-fa3, varlen-fa4 with another one
cudnn, sdpa         SDPA on padded tensors, by cuDNN or by what PyTorch chooses
flex                FlexAttention with a block mask
fla                 flash-linear-attention's parallel attention
NAME=module:func    a callable with the signature of `gemattn.jagged_attention`
==================  ===================================================================================================
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass

from gemattn.bench.providers.base import Provider

DEFAULT = "tlx,triton,fa4,varlen"
ALL = "tlx,triton,fa4,varlen,varlen-fa3,varlen-fa4,cudnn,sdpa,flex,fla"


@dataclass(frozen=True)
class Spec:
    """A provider as the command line names it: `name` in tables, `kind` of factory, its argument.

    Specs with equal `process` may share a process; another folder or an activated FlashAttention wants one of its own.
    """

    name: str
    kind: str
    argument: str | None = None

    @property
    def process(self) -> str:
        """Key of the process that it runs in."""
        if self.kind in ("varlen-fa3", "varlen-fa4") or (self.kind == "fa4" and self.argument is not None):
            return self.name
        return "shared"

    def python_path(self, inherited: str) -> str:
        """PYTHONPATH of that process."""
        from gemattn.bench.providers.fa4 import python_path

        return python_path(self.argument, inherited) if self.kind == "fa4" else inherited


# Kind -> (module, class, arguments). Imported on demand: describing a provider must not load its rivals' packages.
_FACTORIES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "tlx": ("ours", "Gemattn", ("tlx",)),
    "triton": ("ours", "Gemattn", ("triton",)),
    "reference": ("ours", "Gemattn", ("reference",)),
    "fa4": ("fa4", "FlashAttention4", ()),
    "varlen": ("varlen", "TorchVarlen", ()),
    "varlen-fa3": ("varlen", "TorchVarlen", ("FA3",)),
    "varlen-fa4": ("varlen", "TorchVarlen", ("FA4",)),
    "cudnn": ("padded", "PaddedSdpa", ("CUDNN_ATTENTION",)),
    "sdpa": ("padded", "PaddedSdpa", ()),
    "flex": ("flex", "Flex", ()),
    "fla": ("fla", "FlaParallel", ()),
}


def parse(text: str) -> list[Spec]:
    """Specs of a comma-separated list such as "triton,fa4=FOLDER,mine=module:function"; "all" is everyone.

    Raises:
        ValueError: an unknown name, an empty or a doubled one, or an argument that is no folder and no module:function.
    """
    specs: list[Spec] = []
    for part in (ALL if text == "all" else text).split(","):
        name, equals, argument = part.strip().partition("=")
        if not name:
            raise ValueError(f"providers is {text!r}, wanted names with commas between")
        if name in (spec.name for spec in specs):
            raise ValueError(f"provider {name} is named twice; a second copy takes another name: fa4-old=FOLDER")
        if not equals:
            if name not in _FACTORIES:
                raise ValueError(f"provider is {name!r}, wanted one of {', '.join(_FACTORIES)} or NAME=...")
            specs.append(Spec(name, name))
        elif os.path.isdir(argument):
            specs.append(Spec(name, "fa4", argument))
        elif ":" in argument and os.sep not in argument:
            specs.append(Spec(name, "custom", argument))
        else:
            raise ValueError(f"provider {part!r}: {argument!r} is no folder and no module:function")
    return specs


def make(spec: Spec) -> Provider:
    """The provider of a spec."""
    if spec.kind == "custom":
        from gemattn.bench.providers.ours import Custom

        assert spec.argument is not None
        return Custom(spec.argument)
    module, name, arguments = _FACTORIES[spec.kind]
    factory: Callable[..., Provider] = getattr(importlib.import_module(f"gemattn.bench.providers.{module}"), name)
    return factory(*arguments)
