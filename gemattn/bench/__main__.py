"""Command line of the benchmark.

python -m gemattn.bench attention --out results                        # our kernels, FlashAttention-4, torch varlen
python -m gemattn.bench attention --suite hsp --providers triton,fa4=FOLDER,fa4-old=OTHER --budget-s 300
python -m gemattn.bench attention --smoke                              # any machine; figures mean nothing
python -m gemattn.bench floor --gpu b200                               # arithmetic for a card that is not here
python -m gemattn.bench model --recipe long                            # a training step, jagged against padded
python -m gemattn.bench plots results/results.json                     # later, where matplotlib is
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from gemattn.bench import floor, plots, providers, report, results, shapes


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 where the run could measure nothing, 2 for wrong arguments."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(words)
    options.words = words
    try:
        return int(options.command(options))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def attention(options: argparse.Namespace) -> int:
    """Measure the attention kernels."""
    import torch

    from gemattn.bench.client import ProcessWorker
    from gemattn.bench.run import Run

    if options.smoke:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        raise ValueError("no CUDA GPU here; --smoke shows on any machine that the command works")
    specs = providers.parse(options.providers or ("triton,reference,sdpa" if options.smoke else providers.DEFAULT))
    selected = shapes.select(options.suite or ("smoke" if options.smoke else "hsp,self"), options.shapes)
    old = results.read(options.compare) if options.compare else None
    for spec in specs:
        spec.python_path("")  # a wrong folder is an error now, not one of a process
    device = "cpu" if options.smoke else "cuda"
    groups: dict[str, list[providers.Spec]] = {}
    for spec in specs:
        groups.setdefault(spec.process, []).append(spec)
    workers = [ProcessWorker(group, device, options.out / "logs" / f"{name}.log") for name, group in groups.items()]
    run = Run(
        list(workers),
        options.out / "results.json",
        rounds=options.rounds or (1 if options.smoke else 10),
        budget_s=options.budget_s,
        busy=not options.no_busy,
        meaningless=options.smoke,
        command=["python", "-m", "gemattn.bench", *options.words],
        say=lambda line: print(line, flush=True),
    )
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit ends a run like Ctrl-C
    try:
        if options.smoke:
            print(report.MEANINGLESS)
        present = run.begin()
        if present:
            run.measure(selected)
        else:
            print("no provider is present: nothing measured")
    except KeyboardInterrupt:
        print("\ninterrupted: what was measured is kept")
    finally:
        signal.signal(signal.SIGTERM, before)
        for worker in workers:
            worker.close()
    write_report(run.results, options.out)
    if not any("providers" in shape for shape in run.results["shapes"]):
        return 1
    print()
    print(report.summary(run.results))
    if old is not None:
        print()
        print(results.compare(run.results, old))
    return 0


def write_report(measured: results.Results, folder: Path) -> None:
    """report.md and, with matplotlib, the plots."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(report.markdown(measured))
    if reason := plots.matplotlib_missing():
        print(f"no plots: {reason}; later: python -m gemattn.bench plots {folder / 'results.json'}")
    else:
        plots.draw(measured, folder)
    print(f"written: {folder / 'results.json'}, {folder / 'report.md'}")


def show_floor(options: argparse.Namespace) -> int:
    """Print floors by arithmetic."""
    ceilings = floor.GPUS[options.gpu]
    if options.copy_tb_s or options.matrix_tflop_s:
        copy, matrix = options.copy_tb_s or ceilings.copy_tb_s, options.matrix_tflop_s or ceilings.matrix_tflop_s
        source = f"given on the command line: {copy:g} TB/s, {matrix:g} TFLOP/s dense bf16"
        ceilings = dataclasses.replace(ceilings, copy_tb_s=copy, matrix_tflop_s=matrix, source=source)
    print(floor.table(shapes.select(options.suite, options.shapes), ceilings))
    return 0


def model(options: argparse.Namespace) -> int:
    """Measure a training step."""
    from gemattn.bench.model import main as measure

    return measure(options)


def show_report(options: argparse.Namespace) -> int:
    """Write report.md and the plots again."""
    measured = results.read(options.results)
    write_report(measured, options.results.parent)
    print(report.summary(measured))
    return 0


def show_plots(options: argparse.Namespace) -> int:
    """Draw the plots."""
    for path in plots.draw(results.read(options.results), options.out or options.results.parent):
        print(path)
    return 0


def show_comparison(options: argparse.Namespace) -> int:
    """What moved between two results files."""
    print(results.compare(results.read(options.results), results.read(options.old)))
    return 0


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m gemattn.bench", description=__doc__, formatter_class=formatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser(
        "attention", help="kernels against their rivals", description=providers.__doc__, formatter_class=formatter
    )
    command.set_defaults(command=attention)
    command.add_argument("--suite", help="hsp, self, extra, all, or several with commas (default hsp,self)")
    command.add_argument("--shapes", help="only shapes that have one of these comma-separated parts in their name")
    command.add_argument("--providers", help=f"who is compared, or all (default {providers.DEFAULT})")
    command.add_argument(
        "--out", type=Path, default=Path("bench-results"), help="folder for results.json and report.md"
    )
    command.add_argument("--rounds", type=_positive, help="rounds a shape (default 10)")
    command.add_argument("--budget-s", type=float, help="seconds that the run may take, compilation included")
    command.add_argument("--no-busy", action="store_true", help="skip the profiled run that gives device-kernel times")
    command.add_argument("--compare", type=Path, metavar="OLD.json", help="print what moved against an earlier run")
    command.add_argument("--smoke", action="store_true", help="tiny shapes on a CPU, in Triton's interpreter")

    command = commands.add_parser("model", help="a training step of the GEM-like model, jagged against padded")
    command.set_defaults(command=model)
    command.add_argument("--recipe", default="long", help="size of the model and of its histories")
    command.add_argument("--impl", default="auto", help="implementation of the jagged attention")
    command.add_argument("--steps", type=_positive, help="timed steps each (default 10)")
    command.add_argument("--out", type=Path, default=Path("bench-results"), help="folder for model.json")
    command.add_argument("--smoke", action="store_true", help="a tiny recipe on any machine; figures mean nothing")

    command = commands.add_parser("floor", help="floors of a card that is not here, by arithmetic")
    command.set_defaults(command=show_floor)
    command.add_argument("--gpu", choices=floor.GPUS, default="b200")
    command.add_argument("--copy-tb-s", type=float, help="another copy rate, TB/s read plus written")
    command.add_argument("--matrix-tflop-s", type=float, help="another matrix rate, dense bf16 TFLOP/s")
    command.add_argument("--suite", default="hsp,self,extra")
    command.add_argument("--shapes", help="only shapes that have one of these comma-separated parts in their name")

    command = commands.add_parser("report", help="write report.md and the plots of a results.json again")
    command.set_defaults(command=show_report)
    command.add_argument("results", type=Path)

    command = commands.add_parser("plots", help="draw the plots of a results.json")
    command.set_defaults(command=show_plots)
    command.add_argument("results", type=Path)
    command.add_argument("--out", type=Path, help="folder (default: the file's)")

    command = commands.add_parser("compare", help="what moved between two results.json")
    command.set_defaults(command=show_comparison)
    command.add_argument("results", type=Path)
    command.add_argument("old", type=Path)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


if __name__ == "__main__":
    sys.exit(main())
