"""When the TLX kernels are compared with the reference on a GPU that they have not met, and when a call is refused."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from gemattn import dispatch
from gemattn.comparison import differences

_verdicts: dict[torch.device, str] = {}
"""What the last check found: nothing, or the message of its error. Unchecked devices are absent."""
_lock = threading.Lock()


def self_check(device: torch.device | str | int | None = None) -> None:
    """Compare the TLX kernels with the reference on a small batch, forward and backward.

    `jagged_attention` runs it by itself at the first eager call that takes these kernels on a GPU that they have never
    met (compute capability 10.x), once a process and device. While a graph is compiled, exported or captured it does
    not run, nor when a compiled or exported program or the bare operator does: on an unchecked device all of these
    raise RuntimeError. Call it yourself before them. A call of yours always checks, after a failure too.

    Covered: head sizes 64 (bfloat16) and 128 (float16) in causal cross-attention with sequences without queries and
    rows without keys, and a shared query (128, bfloat16). Not covered: windows, grouped heads, long sequences. It
    compiles what these take, then runs for about a second, syncs, and leaves no trace in the caller's autograd,
    generators or modes. A GPU that does not come to an end within 60 seconds is an error as well; one that hangs while
    the driver loads the next kernel cannot be left, and in either case the process has to be ended.

    Args:
        device: a CUDA device; the current one by default.

    Raises:
        RuntimeError: a result differs (the message says which, and by how much), or the check could not be carried out
            (the cause is chained), or it is called while a graph is compiled, exported or captured.
        UnsupportedError: the kernels cannot run on the device.
    """
    place = torch.device("cuda") if device is None else torch.device(device)
    if torch.compiler.is_compiling() or _capturing(place):
        _refuse_in_graph(place)
    with _lock:
        _check(_indexed(place))


def require_confirmed(device: torch.device) -> None:
    """Run `self_check` where it was not run yet, is needed and may run; raise RuntimeError if it failed or may not."""
    if not torch.compiler.is_compiling() and dispatch.unconfirmed(device):
        place = _indexed(device)
        if place not in _verdicts and not _capturing(place):
            with _lock:
                if place not in _verdicts:  # another thread was first
                    _check(place)
    refuse_unconfirmed(device)


@dispatch.called_while_traced  # an error in traced code would only break the graph
def refuse_unconfirmed(device: torch.device) -> None:
    """Raise RuntimeError unless the TLX kernels have passed on the device, or need not. Checks nothing itself."""
    if not dispatch.unconfirmed(device):
        return
    verdict = _verdicts.get(_indexed(device))
    if verdict is None:
        raise RuntimeError(
            f"the TLX kernels have never met {device} and are unchecked: call gemattn.self_check() once in the process "
            "before a graph is compiled, exported, captured or run, or set GEMATTN_DISABLE_TLX=1 to go without them"
        )
    if verdict:
        raise RuntimeError(verdict)


@dispatch.called_while_traced
def _refuse_in_graph(device: torch.device) -> None:
    raise RuntimeError(
        f"gemattn.self_check() cannot run on {device} while a graph is compiled, exported or captured: call it before"
    )


def _indexed(device: torch.device) -> torch.device:
    return torch.device("cuda", dispatch.index_of(device)) if device.type == "cuda" else device


def _capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is captured from the current stream, of the current device or of this one."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        there = torch.cuda.is_current_stream_capturing()
    return there or torch.cuda.is_current_stream_capturing()


def _check(place: torch.device) -> None:
    """Fill in the verdict, and raise RuntimeError if it is a bad one."""
    cause = None
    try:
        # Gradient mode, hooks of saved tensors, modes, autocast, the default device and the current stream are a
        # thread's own: in a new one none is set.
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(differences, place).result()
    except dispatch.UnsupportedError:
        raise
    except Exception as error:
        found, cause = f"{type(error).__name__}: {error}", error
    _verdicts[place] = found and (
        f"gemattn.self_check() on {place}: {found}\nThe TLX kernels cannot be trusted on this GPU or with this "
        "compiler: set GEMATTN_DISABLE_TLX=1 to go on without them, and please report it"
    )
    if found:
        raise RuntimeError(_verdicts[place]) from cause
