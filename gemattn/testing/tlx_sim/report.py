"""What a simulation found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from gemattn.testing.tlx_sim.clocks import Place

KINDS = (
    "race",
    "race between warps",
    "missing fence",
    "uninitialised read",
    "pending read",
    "deadlock",
    "barrier",
    "bounds",
    "capacity",
    "error",
)


class SimulationError(RuntimeError):
    """A launch that could not end: a deadlock, or an error inside the kernel. The message names the kernel's lines."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a kernel; `kind` is one of `KINDS`."""

    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass
class Report:
    """Findings of all launches under one `simulate`, each told once, and what the schedule did."""

    arch: int
    seed: int
    policy: str
    findings: list[Finding] = field(default_factory=list)
    statistics: Counter[str] = field(default_factory=Counter)
    reached: set[Place] = field(default_factory=set)
    """Lines with TLX operations that were run."""
    enough: Callable[[Finding], bool] = lambda finding: False
    """Whether a finding ends the launch."""
    _told: set[tuple[object, ...]] = field(default_factory=set)

    def add(self, kind: str, message: str, key: tuple[object, ...] | None = None) -> None:
        """Record a finding; a second one with the same key only counts."""
        key = (kind, message) if key is None else (kind, *key)
        self.statistics[f"found: {kind}"] += 1
        if key not in self._told:
            self._told.add(key)
            self.findings.append(Finding(kind, message))
            if self.enough(self.findings[-1]):
                raise SimulationError(message)

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def of_kind(self, kind: str) -> list[Finding]:
        """The findings of one kind."""
        return [x for x in self.findings if x.kind == kind]

    @property
    def races(self) -> list[Finding]:
        """Conflicting accesses that nothing orders."""
        return [x for x in self.findings if x.kind.startswith("race")]

    @property
    def deadlocks(self) -> list[Finding]:
        """Launches in which every task waited for ever."""
        return self.of_kind("deadlock")

    def raise_if_any(self) -> None:
        """Raise AssertionError with the whole report unless `ok`."""
        if not self.ok:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        head = f"sm_{self.arch}, seed {self.seed}, policy {self.policy}: "
        counts = ", ".join(f"{k} {v}" for k, v in sorted(self.statistics.items()))
        head += "nothing found" if self.ok else f"{len(self.findings)} found"
        return "\n".join([head, *(f"  {x}" for x in self.findings), f"  [{counts}]"])
