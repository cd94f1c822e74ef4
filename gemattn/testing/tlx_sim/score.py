"""Many seeds of a scenario, and the mutation score: each run in a process of its own, for a mutant may crash."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemattn.testing.tlx_sim.machine import short
from gemattn.testing.tlx_sim.mutate import Mutant, mutants
from gemattn.testing.tlx_sim.report import Report, SimulationError
from gemattn.testing.tlx_sim.scenarios import SCENARIOS
from gemattn.testing.tlx_sim.simulate import simulate

PROCESSORS = 1
"""One program walks all tiles: buffers and phases go round most often."""


@dataclass(frozen=True)
class Outcome:
    """What one simulation of a scenario gave."""

    findings: tuple[str, ...]
    wrong: str
    reached: frozenset[tuple[str, int]] = frozenset()
    seconds: float = 0.0


def once(name: str, seed: int, policy: str = "adversarial", mutant: Mutant | None = None) -> Outcome:
    """Simulate a scenario."""
    scenario = SCENARIOS[name]
    begin = time.process_time()
    with simulate(scenario.arch, seed, policy, PROCESSORS, scenario.explicit_fences, mutant) as run:
        try:
            wrong = scenario.wrong(scenario.run())
        except SimulationError:
            wrong = ""  # it is among the findings
    return Outcome(_texts(run.report), wrong, frozenset(run.report.reached), time.process_time() - begin)


def _texts(report: Report) -> tuple[str, ...]:
    return tuple(map(str, report.findings))


def many(name: str, seeds: Iterable[int]) -> list[Outcome]:
    """Simulate a scenario under several seeds."""
    return [once(name, seed) for seed in seeds]


def harmful(name: str, outcome: Outcome) -> list[str]:
    """Findings that the scenario's kernel is not known to have, and a wrong result."""
    found = [x for x in outcome.findings if not x.startswith(SCENARIOS[name].known or ("-",))]
    return found + ([outcome.wrong] if outcome.wrong else [])


def isolated(work: Callable[..., Any], *args: Any, seconds: float) -> Any:
    """`work(*args)` in a forked process; None if it crashes or takes longer than `seconds`."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=lambda: send.send(work(*args)))
    process.start()
    send.close()
    try:
        return receive.recv() if receive.poll(seconds) else None
    except EOFError:
        return None
    finally:
        process.kill()
        process.join()


def first_catch(names: list[str], mutant: Mutant, seeds: int, known: dict[str, set[str]]) -> tuple[int, str] | None:
    """(Number of schedules, what was found) of the first schedule that shows the mutant; None if none does."""
    for seed in range(seeds):
        for name in names:
            outcome = once(name, seed, mutant=mutant)
            new = [x for x in outcome.findings if x not in known[name]]
            if new or outcome.wrong:
                return seed + 1, (new or [outcome.wrong])[0]
    return None


@dataclass(frozen=True)
class Verdict:
    """Whether a mutant was caught; `schedules` 0 where it was not, or its line never ran."""

    mutant: Mutant
    schedules: int
    what: str


def score(names: list[str], files: list[str], seeds: int, tell: Callable[[str], None]) -> list[Verdict]:
    """Try every mutant of the files under those scenarios that reach its line."""
    baselines = {name: many(name, range(5)) for name in names}
    known = {name: {x for o in outcomes for x in o.findings} for name, outcomes in baselines.items()}
    reached = {name: set().union(*(o.reached for o in outcomes)) for name, outcomes in baselines.items()}
    verdicts = []
    for file in files:
        for mutant in mutants(file):
            place = short(file), mutant.line
            able = [name for name in names if place in reached[name]]
            if not able:
                continue
            caught = isolated(_answer, able, mutant, seeds, known, seconds=60 + 4.0 * seeds * len(able))
            if caught is None:
                caught = (1, "crashed or ran for ever")
            verdict = Verdict(mutant, *(caught or (0, "not caught")))
            tell(f"{'caught' if verdict.schedules else 'MISSED'} ({verdict.schedules}) {mutant}: {verdict.what[:160]}")
            verdicts.append(verdict)
    return verdicts


def _answer(names: list[str], mutant: Mutant, seeds: int, known: dict[str, set[str]]) -> tuple[int, str] | tuple[()]:
    """`first_catch`, with () for none: None is for a crash."""
    return first_catch(names, mutant, seeds, known) or ()


def own_files(architecture: str) -> list[str]:
    """The sources of the package's kernels for "hopper" or "blackwell"."""
    from gemattn.kernels import tlx

    folder = Path(tlx.__file__).parent / architecture
    return [str(x) for x in sorted(folder.glob("*.py")) if "tlx." in x.read_text() and x.name != "__init__.py"]
