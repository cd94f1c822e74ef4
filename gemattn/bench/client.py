"""The other end of a worker process: sends requests, waits with a limit, knows who was at work when it ended."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

from gemattn.bench.providers import Spec


class WorkerError(Exception):
    """A request was answered by an error; the process lives on."""


class WorkerLost(Exception):
    """The process is gone. `culprit` is the provider that it was busy with, if it was."""

    def __init__(self, message: str, culprit: str | None) -> None:
        super().__init__(message)
        self.culprit = culprit


class Worker(Protocol):
    """What a run needs of a process that holds providers."""

    specs: list[Spec]

    def send(self, do: str, **arguments: Any) -> None:
        """Ask; the answer comes by `receive`."""

    def receive(self) -> Any:
        """The answer to what was sent. Raises WorkerError or WorkerLost."""

    def restart(self) -> None:
        """A new process in place of a lost one."""

    def close(self) -> None:
        """End the process."""


class ProcessWorker:
    """A `gemattn.bench.worker` in a process of its own.

    Args:
        specs: providers that share the process.
        device: "cuda" or "cpu".
        log: where its stderr goes.
        limit_s: how long a request may take without any line from it; then it is killed.
    """

    def __init__(self, specs: list[Spec], device: str, log: Path, limit_s: float = 240.0) -> None:
        self.specs = specs
        self._device, self._log, self._limit = device, log, limit_s
        self._at: str | None = None
        self._buffer = b""
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        configuration = {
            "specs": [vars(spec) for spec in self.specs],
            "device": self._device,
        }
        environment = dict(os.environ)
        environment["PYTHONPATH"] = self.specs[0].python_path(os.environ.get("PYTHONPATH", ""))
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._buffer = b""
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "gemattn.bench.worker", json.dumps(configuration)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the run, which ends its workers
            )

    def send(self, do: str, **arguments: Any) -> None:
        """Ask; the answer comes by `receive`."""
        assert self._process.stdin is not None
        self._at = arguments.get("name")
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it is gone: receive says so

    def receive(self) -> Any:
        """The answer to what was sent.

        Raises:
            WorkerError: the request failed.
            WorkerLost: the process ended, hung or lost its CUDA context.
        """
        while True:
            message = json.loads(self._line())
            if "at" in message:
                self._at = message["at"]
            elif "error" in message:
                if message["error"].startswith("BrokenContext"):
                    self._stop()
                    raise WorkerLost(message["error"], self._at)
                raise WorkerError(message["error"])
            else:
                return message["result"]

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            with selectors.DefaultSelector() as selector:
                selector.register(self._process.stdout, selectors.EVENT_READ)
                if not selector.select(self._limit):
                    self._stop()
                    raise WorkerLost(f"no answer in {self._limit:.0f} s, killed", self._at)
            part = os.read(self._process.stdout.fileno(), 1 << 16)
            if not part:
                code = self._process.wait()
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                raise WorkerLost(f"its process ended ({how}); see {self._log.name}", self._at)
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def restart(self) -> None:
        """A new process in place of a lost one."""
        self._stop()
        self._process = self._start()

    def _stop(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def close(self) -> None:
        """End the process."""
        self._stop()
