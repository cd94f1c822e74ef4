"""What a mutation run comes to: caught, missed, benign for a reason, not reached."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gemattn.testing.tlx_sim.benign import BENIGN, Benign, why_benign, without_mutant
from gemattn.testing.tlx_sim.score import Verdict


@dataclass(frozen=True)
class Summary:
    """The verdicts on a set of sources, each told apart."""

    caught: list[Verdict]
    missed: list[Verdict]
    benign: list[tuple[Verdict, str]]
    """With the reason."""
    unreached: list[tuple[Verdict, str]]
    """With the reason, where there is one."""
    outdated: list[str]
    """What the table says of mutants that are caught, or that there are none of."""

    @classmethod
    def of(cls, verdicts: list[Verdict], table: Iterable[Benign] = BENIGN) -> Summary:
        """Tell them apart."""
        found = [(v, why_benign(v.mutant, table)) for v in verdicts]
        outdated = [f"{v.mutant}: it is caught, by {v.what}" for v, why in found if v.schedules and why]
        outdated += [f"{text}: there is no such mutant" for text in without_mutant([v.mutant for v in verdicts], table)]
        return cls(
            caught=[v for v, _ in found if v.schedules],
            missed=[v for v, why in found if v.reached and not v.schedules and not why],
            benign=[(v, why) for v, why in found if v.reached and not v.schedules and why],
            unreached=[(v, why) for v, why in found if not v.reached],
            outdated=outdated,
        )

    @property
    def good(self) -> bool:
        """Whether nothing was missed, and all that was not tried has its reason."""
        return not self.missed and not self.outdated and all(why for _, why in self.unreached)

    def lines(self) -> Iterator[str]:
        """As text."""
        caught, wrong = len(self.caught), len(self.caught) + len(self.missed)
        yield (
            f"caught {caught} of {wrong} that are really wrong, {caught / max(wrong, 1):.1%} "
            f"({len(self.benign)} benign, {len(self.unreached)} not reached)"
        )
        tried = Counter(v.mutant.kind for v in self.caught + self.missed)
        kept = Counter(v.mutant.kind for v in self.caught)
        yield "    " + ", ".join(f"{kind} {kept[kind]}/{n}" for kind, n in sorted(tried.items()))
        late = sorted(v.schedules for v in self.caught if v.schedules > 1)
        yield f"    {caught - len(late)} by the first schedule" + (f", all by schedule {late[-1]}" if late else "")
        yield from (f"    missed: {v.mutant}" for v in self.missed)
        for word, verdicts in (("not reached", self.unreached), ("benign", self.benign)):
            for why, group in itertools.groupby(verdicts, key=lambda x: x[1]):
                yield from (f"    {word}: {verdict.mutant}" for verdict, _ in group)
                if why:
                    yield f"        {why}"
        yield from (f"    benign.py is out of date: {text}" for text in self.outdated)
