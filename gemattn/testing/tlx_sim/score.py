"""Many seeds of a scenario, and the mutation score: each mutant in a process of its own, for it may crash."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemattn.testing.tlx_sim.benign import why_benign
from gemattn.testing.tlx_sim.machine import short
from gemattn.testing.tlx_sim.mutate import Mutant, mutants
from gemattn.testing.tlx_sim.report import Finding, Report, SimulationError
from gemattn.testing.tlx_sim.scenarios import SCENARIOS
from gemattn.testing.tlx_sim.simulate import simulate

BENIGN_SCHEDULES = 5
"""For mutants that are said to be benign: enough to see that one is not."""
PROCESSORS = 1
"""One program walks all tiles: buffers and phases go round most often."""


@dataclass(frozen=True)
class Outcome:
    """What one simulation of a scenario gave."""

    findings: tuple[str, ...]
    wrong: str
    reached: frozenset[tuple[str, int]] = frozenset()
    seconds: float = 0.0


def once(
    name: str,
    seed: int,
    policy: str = "adversarial",
    mutant: Mutant | None = None,
    enough: Callable[[Finding], bool] = lambda finding: False,
) -> Outcome:
    """Simulate a scenario, up to the first finding that is enough."""
    scenario = SCENARIOS[name]
    begin = time.process_time()
    with simulate(scenario.arch, seed, policy, PROCESSORS, scenario.explicit_fences, mutant) as run:
        run.report.enough = enough
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


def first_catch(names: list[str], mutant: Mutant, schedules: int, known: dict[str, set[str]]) -> tuple[int, str] | None:
    """(Number of schedules, what was found) of the first one that shows the mutant; None if none does.

    The scenarios take turns, each with the next seed.
    """
    for turn in range(schedules):
        name = names[turn % len(names)]

        def enough(finding: Finding, name: str = name) -> bool:
            return str(finding) not in known[name]

        outcome = once(name, turn // len(names), mutant=mutant, enough=enough)
        new = [x for x in outcome.findings if x not in known[name]]
        if new or outcome.wrong:
            return turn + 1, (new or [outcome.wrong])[0]
    return None


@dataclass(frozen=True)
class Verdict:
    """On one mutant. `schedules`: how many it took to catch it, 0 where none did or `reached` is false."""

    mutant: Mutant
    reached: bool
    schedules: int
    what: str


def score(names: list[str], files: list[str], schedules: int, tell: Callable[[str], None]) -> list[Verdict]:
    """Try every mutant of the files under those scenarios that reach its line, the quickest first."""
    baselines = {name: many(name, range(3)) for name in names}
    known = {name: {x for o in outcomes for x in o.findings} for name, outcomes in baselines.items()}
    reached = {name: set().union(*(o.reached for o in outcomes)) for name, outcomes in baselines.items()}
    names = sorted(names, key=lambda name: sum(o.seconds for o in baselines[name]))
    verdicts = []
    for mutant in (m for file in files for m in mutants(file)):
        able = [name for name in names if (short(mutant.file), mutant.line) in reached[name]]
        if able:
            turns = min(schedules, BENIGN_SCHEDULES) if why_benign(mutant) else schedules
            caught = isolated(_answer, able, mutant, turns, known, seconds=60 + 20.0 * turns)
            if caught is None:
                caught = (1, "crashed or ran for ever")
            verdict = Verdict(mutant, True, *(caught or (0, "not caught")))
        else:
            verdict = Verdict(mutant, False, 0, "not reached")
        tell(f"{'caught' if verdict.schedules else 'MISSED'} ({verdict.schedules}) {mutant}: {verdict.what[:160]}")
        verdicts.append(verdict)
    return verdicts


def _answer(
    names: list[str], mutant: Mutant, schedules: int, known: dict[str, set[str]]
) -> tuple[int, str] | tuple[()]:
    """`first_catch`, with () for none: None is for a crash."""
    return first_catch(names, mutant, schedules, known) or ()


def own_files(architecture: str) -> list[str]:
    """The sources of the package's kernels for "hopper" or "blackwell"."""
    from gemattn.kernels import tlx

    folder = Path(tlx.__file__).parent / architecture
    return [str(x) for x in sorted(folder.glob("*.py")) if "tlx." in x.read_text() and x.name != "__init__.py"]
