"""Who may import whom, and what the texts of the repository must not hold."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OPTIONAL = ("triton", "torchrec", "fbgemm_gpu", "tensordict")

# From the bottom up. A module imports only from rows below its own, or from its own folder or file.
ROOMS = [
    {"gemattn.spec"},
    {"gemattn.kernels"},
    {"gemattn.reference"},
    {"gemattn.flops"},
    {"gemattn.dispatch"},
    {"gemattn.comparison"},
    {"gemattn.confirm"},
    {"gemattn.ops"},
    {"gemattn.attention"},
    {"gemattn.rec"},
    {"gemattn.nn"},
    {"gemattn"},
    {"gemattn.testing"},
    {"gemattn.bench"},
    {"models"},
    {"examples"},
]
RANK = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms}


def run_python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_import_loads_no_optional_package():
    run_python(f"import sys, gemattn; loaded = sys.modules.keys() & set({OPTIONAL!r}); assert not loaded, loaded")


def test_works_where_optional_packages_are_missing():
    """As on a machine that has torch alone: the operator trains and the kernels say what they need."""
    run_python(
        f"""
import importlib.machinery as machinery, sys

class Without:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL!r}:
            return None
        return machinery.PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Without if finder is machinery.PathFinder else finder for finder in sys.meta_path]

import torch, gemattn

query, key, value = (torch.ones(3, 2, 16, requires_grad=True) for _ in range(3))
offsets = torch.tensor([0, 1, 3])
out = gemattn.jagged_attention(query, key, value, offsets)
out.sum().backward()
assert torch.allclose(out, torch.ones(3, 2, 16)), out
assert torch.allclose(value.grad, torch.ones(3, 2, 16)), value.grad
reasons = gemattn.unsupported_reasons("triton", query, key, value, offsets)
assert any("triton is not installed" in reason for reason in reasons), reasons
assert gemattn.JaggedAttention(16, 2).q_proj.weight.shape == (16, 16)
"""
    )


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_name(path): path for top in ("gemattn", "models", "examples") for path in sorted((ROOT / top).rglob("*.py"))
}


def imports_of(path: Path) -> set[str]:
    """Every module that a file names in an import statement, wherever in the file it stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(name if name in SOURCES else str(node.module) for name in names)
    return found


def room(module: str) -> str | None:
    """The longest row of ROOMS that a module lies in: gemattn.kernels.schedule -> gemattn.kernels."""
    parts = module.split(".")
    if parts[0] == "gemattn":
        return module if len(parts) == 1 else ".".join(parts[:2])
    return parts[0] if parts[0] in RANK else None


def test_every_module_has_a_room():
    assert {room(module) for module in SOURCES} <= RANK.keys()


@pytest.mark.parametrize("module", SOURCES)
def test_imports_go_downward(module):
    own = room(module)
    for imported in imports_of(SOURCES[module]):
        other = room(imported)
        if other is not None:
            assert other == own or RANK[other] < RANK[own], f"{module} imports {imported}, which lies above it"


def lies_in(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


@pytest.mark.parametrize("module", [name for name in SOURCES if name.startswith("gemattn.kernels.")])
def test_kernels_keep_to_their_architecture(module):
    architectures = ("gemattn.kernels.triton", "gemattn.kernels.tlx.hopper", "gemattn.kernels.tlx.blackwell")
    own = [name for name in architectures if lies_in(module, name)]
    others = [name for name in architectures if name not in own]
    if own:
        crossing = {imported for imported in imports_of(SOURCES[module]) if lies_in(imported, *others)}
        assert not crossing


@pytest.mark.parametrize("module", [name for name in SOURCES if lies_in(name, "gemattn")])
def test_triton_is_imported_by_kernels_alone(module):
    imported = imports_of(SOURCES[module])
    if not lies_in(module, "gemattn.kernels", "gemattn.testing", "gemattn.bench"):
        assert not any(lies_in(name, "triton") for name in imported)
    if module != "gemattn.kernels.tlx._tlx":
        assert not any(lies_in(name, "triton.language.extra.tlx") for name in imported)


def test_package_says_that_it_is_typed():
    assert (ROOT / "gemattn/py.typed").is_file()


def text_files() -> list[Path]:
    hidden = [ROOT / ".ci/run", ROOT / ".pre-commit-config.yaml", ROOT / ".gitignore"]
    folders = ("gemattn", "models", "examples", "tests", "tools", "packaging", "requirements")
    kinds = {".py", ".md", ".toml", ".txt", ".sh", ".json"}
    nested = [path for top in folders for path in (ROOT / top).rglob("*") if path.suffix in kinds]
    return [*hidden, ROOT / "Makefile", *ROOT.glob("*.md"), *ROOT.glob("*.toml"), *nested]


def test_no_text_names_a_place_of_one_machine():
    somewhere = re.compile(r"(?<![\w.~-])/(?:tmp|home|root|Users|work)/\w")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in text_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if somewhere.search(line)
    ]
    assert not found


def test_set_up_names_no_index_but_pytorch_own():
    files = [ROOT / "Makefile", ROOT / ".ci/run", ROOT / "pyproject.toml"]
    files += [path for top in ("requirements", "packaging", "tools") for path in (ROOT / top).rglob("*.*")]
    urls = {url for path in files if path.is_file() for url in re.findall(r"https?://[^\s'\"]+", path.read_text())}
    assert urls == {"https://download.pytorch.org/whl/cpu"}
