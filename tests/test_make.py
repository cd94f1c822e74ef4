"""The Makefile, run for real on stand-ins for Python, pip and nvidia-smi: no network, nothing installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
INDEX = "https://download.pytorch.org/whl/cpu"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make, found none")

# A python that says it is $FAKE_VERSION and whose venv holds a pip that writes down its arguments and fails where they
# match $FAIL_ON.
PYTHON = f"""#!/bin/sh
case "$*" in
*sys.executable*) echo "$0" ;;
*ensurepip*) exit "${{FAKE_NO_VENV:-0}}" ;;
*%d.%d.%d*) echo "$FAKE_VERSION.5" ;;
*%d.%d*) echo "$FAKE_VERSION" ;;
"-m venv --clear .venv")
    rm -rf .venv && mkdir -p .venv/bin
    cp tools/fake_pip .venv/bin/pip
    printf '#!/bin/sh\\n' > .venv/bin/python && chmod +x .venv/bin/python ;;
*) exec {sys.executable} "$@" ;;
esac
"""
PIP = """#!/bin/sh
echo "$*" >> pip.log
case "$*" in $FAIL_ON) exit 1 ;; esac
"""
NVIDIA_SMI = "#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-0)'\n"
NO_GPU = "#!/bin/sh\necho 'No devices were found'\nexit 6\n"


def write_script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


class Sandbox:
    """A folder with the files that the set-up reads and a `bin` in front of PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in ("Makefile", "pyproject.toml"):
            shutil.copy(ROOT / name, folder)
        for name in ("requirements", "packaging", "tools"):
            shutil.copytree(ROOT / name, folder / name)
        write_script(folder / "tools/fake_pip", PIP)
        write_script(self.bin / "python3", PYTHON)
        write_script(self.bin / "nvidia-smi", NO_GPU)
        for compiler in ("gcc", "g++"):
            write_script(self.bin / compiler, "#!/bin/sh\n")

    def make(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        # An outer make hands its own settings down through these.
        outer = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "PYTHON", "FLAVOUR", "JOBS", "ARGS"}
        clean = {name: value for name, value in os.environ.items() if name not in outer}
        clean |= {
            "PATH": f"{self.bin}:{clean['PATH']}",
            "FAKE_VERSION": "3.12",
            "FAIL_ON": "none",
            "PIP_NO_INDEX": "1",
            **env,
        }
        return subprocess.run(["make", *args], cwd=self.folder, env=clean, capture_output=True, text=True, timeout=60)

    def pip_calls(self) -> list[str]:
        """Arguments of pip since the last time this was asked."""
        log = self.folder / "pip.log"
        calls = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return calls

    def stamps(self) -> list[str]:
        return [path.name for path in self.folder.glob(".venv/.ready-*")]


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


def test_cpu_set_up(sandbox):
    done = sandbox.make("setup")
    assert done.returncode == 0, done.stderr
    torch, hatchling, everything, triton, package = sandbox.pip_calls()
    assert torch.endswith(
        f"--no-deps -c requirements/common.txt --retries 0 --timeout 5 --extra-index-url {INDEX} torch"
    )
    assert hatchling.endswith("hatchling")
    assert everything.endswith("-r requirements/cpu.txt ./packaging/fbgemm-gpu")
    assert triton.endswith("--no-deps -r requirements/triton.txt")
    assert package.endswith("--no-deps --no-build-isolation -e .")
    assert INDEX not in f"{hatchling} {everything} {triton} {package}"
    (stamp,) = sandbox.stamps()
    assert stamp.startswith(".ready-cpu-3.12-")


def test_cuda_set_up_as_printed(sandbox):
    write_script(sandbox.bin / "nvidia-smi", NVIDIA_SMI)
    done = sandbox.make("-n", "train")
    assert done.returncode == 0, done.stderr
    calls = [line.split(" ", 1)[1] for line in done.stdout.splitlines() if line.startswith(".venv/bin/pip ")]
    torch, _, everything, triton, _ = calls
    assert torch.endswith("--no-deps -c requirements/common.txt torch")
    assert everything.endswith("-r requirements/cuda.txt")
    assert triton.endswith("--no-deps -r requirements/triton.txt")
    assert INDEX not in done.stdout
    assert done.stdout.rstrip().endswith(".venv/bin/python examples/train_gem.py")
    assert "fbgemm-gpu==1.8.0" in (ROOT / "requirements/cuda.txt").read_text().splitlines()
    assert "FLAVOUR" not in done.stdout and sandbox.stamps() == []
    assert INDEX in sandbox.make("-n", "setup", "FLAVOUR=cpu").stdout


def test_second_call_installs_nothing(sandbox):
    sandbox.make("setup")
    assert len(sandbox.pip_calls()) == 5
    for target in ("setup", "train"):
        assert sandbox.make(target).returncode == 0
        assert sandbox.pip_calls() == []

    for path in sandbox.folder.rglob("*.t*"):
        path.touch()  # a fresh checkout has new times and the same content
    sandbox.make("setup")
    assert sandbox.pip_calls() == []

    with (sandbox.folder / "requirements/common.txt").open("a") as file:
        file.write("another==1.0\n")
    sandbox.make("setup")
    assert len(sandbox.pip_calls()) == 5
    assert len(sandbox.stamps()) == 1


def test_interrupted_install_starts_again(sandbox):
    done = sandbox.make("setup", FAIL_ON="*cpu.txt*")
    assert done.returncode != 0
    assert len(sandbox.pip_calls()) == 3
    assert sandbox.stamps() == []
    assert sandbox.make("setup").returncode == 0
    assert len(sandbox.pip_calls()) == 5
    assert len(sandbox.stamps()) == 1


def test_goes_on_without_the_cpu_index(sandbox):
    done = sandbox.make("setup", FAIL_ON="*extra-index-url*")
    assert done.returncode == 0, done.stderr
    refused, plain, *rest = sandbox.pip_calls()
    assert INDEX in refused
    assert plain.endswith("--no-deps -c requirements/common.txt torch")
    assert len(rest) == 4


def test_chosen_python_stays_chosen(sandbox):
    shutil.move(sandbox.bin / "python3", sandbox.bin / "python3.12")
    write_script(sandbox.bin / "python3", "#!/bin/sh\nexit 1\n")
    assert sandbox.make("setup", "PYTHON=python3.12").returncode == 0
    assert len(sandbox.pip_calls()) == 5
    assert sandbox.make("setup").returncode == 0
    assert sandbox.pip_calls() == []


@pytest.mark.parametrize(
    ("args", "env", "message"),
    [
        (
            ("PYTHON=python3",),
            {"FAKE_VERSION": "3.10"},
            "gemattn: needs Python 3.11, 3.12 or 3.13, but 'python3' is 3.10.5; name another, for example: "
            "make PYTHON=python3.12 test",
        ),
        ((), {"FAKE_VERSION": "3.14"}, "but 'python3' is 3.14.5"),
        (("PYTHON=nosuch",), {}, "gemattn: 'nosuch' does not run; name a Python 3.11, 3.12 or 3.13"),
        ((), {"FAKE_NO_VENV": "1"}, "has no venv module; on Debian or Ubuntu: apt install python3.12-venv"),
    ],
)
def test_unfit_python_is_named(sandbox, args, env, message):
    done = sandbox.make("test", *args, **env)
    assert done.returncode == 2
    assert message in done.stderr
    assert sandbox.pip_calls() == []
    assert not (sandbox.folder / ".venv").exists()


@pytest.mark.parametrize("missing", ["gcc", "g++"])
def test_missing_compiler_is_named(sandbox, missing):
    (sandbox.bin / missing).unlink()
    (sandbox.bin / "uname").symlink_to(shutil.which("uname"))
    done = subprocess.run(
        [shutil.which("sh"), ROOT / "tools/check_machine.sh", sys.executable],
        env={"PATH": str(sandbox.bin)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert f"found no {missing}, " in done.stderr
    assert done.stderr.rstrip().endswith(f"apt install {missing}")


def test_help_lists_every_target(sandbox):
    text = (ROOT / "Makefile").read_text()
    (phony,) = (line for line in text.splitlines() if line.startswith(".PHONY:"))
    listed = [line.split()[1] for line in sandbox.make().stdout.splitlines() if line.startswith("  make ")]
    assert listed == phony.split()[1:]
