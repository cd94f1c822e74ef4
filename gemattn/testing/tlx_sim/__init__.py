"""A simulator of TLX kernels: runs them without a GPU, and says where they race, hang or read what nothing wrote.

    with tlx_sim.simulate(arch=100, seed=0, policy="adversarial") as run:
        kernel[grid](...)
    print(run.report)

docs/tlx_sim.md tells what is modelled.
"""

from gemattn.testing.tlx_sim.report import Finding, Report, SimulationError
from gemattn.testing.tlx_sim.simulate import Run, simulate

__all__ = ["Finding", "Report", "Run", "SimulationError", "simulate"]
