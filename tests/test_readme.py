"""The README is true: its code runs as printed, and what it names exists."""

import ast
import contextlib
import importlib.util
import inspect
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import gemattn
from gemattn.spec import IMPLS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCED = [(match[1], match[2]) for match in FENCE.finditer(README)]
PROSE = FENCE.sub("", README)
# Code spans may be broken over two lines.
SPANS = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", PROSE)]
COMMANDS = [line.strip() for line in PROSE.splitlines() if line.startswith("    ")]
SCRIPTS = {
    "train_gem.py": [ROOT / "examples/train_gem.py"],
    "gemattn.bench": [ROOT / "gemattn/bench/__main__.py"],
}
TARGET_SCRIPT = {"train": "train_gem.py"}  # what `make TARGET ARGS=...` hands its options to
NAME = re.compile(r"\bgemattn(?:\.\w+)+")
URLS = {"https://download.pytorch.org/whl/cpu"}


def python_blocks() -> list[tuple[str, str]]:
    """(code, what it prints): a python block and the text block right after it."""
    pairs = zip(FENCED, [*FENCED[1:], ("", "")], strict=True)
    return [(code, out if kind == "text" else "") for (language, code), (kind, out) in pairs if language == "python"]


def options_of(paths: list[Path]) -> dict[str, list[str] | None]:
    """Option -> its choices where they are written out, from the calls that declare them. Imports nothing."""
    options: dict[str, list[str] | None] = {}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            name = node.args[0].value
            if not isinstance(name, str) or not re.fullmatch(r"--[a-z-]+", name):
                continue
            choices = [keyword.value for keyword in node.keywords if keyword.arg == "choices"]
            options[name] = None
            with contextlib.suppress(ValueError, IndexError):
                options[name] = ast.literal_eval(choices[0])
    return options


def calls_of_scripts() -> Iterator[tuple[str, list[str]]]:
    """(script, its arguments) of every command in the README that runs one of SCRIPTS."""
    for text in (*COMMANDS, *SPANS):
        if text.startswith("make "):
            words = shlex.split(text)
            passed = [word.removeprefix("ARGS=") for word in words if word.startswith("ARGS=")]
            targets = [word for word in words[1:] if "=" not in word]
            if passed and passed != ["..."] and targets[0] in TARGET_SCRIPT:
                yield TARGET_SCRIPT[targets[0]], shlex.split(passed[0])
        else:
            words = text.split()
            for i, word in enumerate(words):
                if (name := word.rpartition("/")[2]) in SCRIPTS:
                    yield name, words[i + 1 :]


@pytest.mark.parametrize("index", range(len(python_blocks())))
def test_code_prints_what_is_printed(index):
    code, wanted = python_blocks()[index]
    if "torchrec" in code:
        pytest.importorskip("torchrec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, f"README.md, python block {index + 1}", "exec"), {"__name__": "readme"})
    assert wanted and printed.getvalue() == wanted


def test_ten_lines_take_a_kjt_to_gradients():
    section = README.split("\n## Ten lines\n")[1].split("\n## ")[0]
    (code,) = [code for language, code in FENCE.findall(section) if language == "python"]
    assert len([line for line in code.splitlines() if line.strip()]) == 10
    assert len(ast.parse(code).body) == 10  # a statement a line
    assert "KeyedJaggedTensor(" in code and ".backward()" in code


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        word
        for text in (*COMMANDS, *SPANS)
        if text.startswith("make ")
        for word in shlex.split(text)[1:]
        if "=" not in word
    }
    assert {"train", "test", "compare", "setup"} <= named
    assert named <= targets


def test_the_training_table_lists_every_option():
    section = README.split("\n## Training\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `--")]
    listed = [option for names, _ in rows for option in re.findall(r"--[a-z-]+", names)]
    options = options_of(SCRIPTS["train_gem.py"])
    assert sorted(listed) == sorted(options)
    for names, text in rows:
        option = names.strip(" `")
        choices = options.get(option)
        # A row whose choices are few names them all.
        if choices is not None:
            assert {f"`{choice}`" for choice in choices} <= set(re.findall(r"`[^`]+`", text)), option


def test_commands_take_the_options_they_are_given():
    seen = set()
    for script, words in calls_of_scripts():
        options = options_of(SCRIPTS[script])
        for i, word in enumerate(words):
            if word.startswith("--"):
                assert word in options, f"{script} has no {word}"
                seen.add((script, word))
                choices = options[word]
                if choices is not None and i + 1 < len(words):
                    assert words[i + 1] in choices, f"{script} {word} {words[i + 1]}"
    assert ("train_gem.py", "--data") in seen and ("gemattn.bench", "--smoke") in seen


def test_options_named_alone_exist():
    known = {"--help"}.union(*(options_of(paths) for paths in SCRIPTS.values()))
    named = {span for span in SPANS if re.fullmatch(r"--[a-z-]+", span)}
    assert named and named <= known


def test_commands_of_the_benchmark_exist():
    source = (ROOT / "gemattn/bench/__main__.py").read_text()
    named = {words[0] for script, words in calls_of_scripts() if script == "gemattn.bench"}
    assert named and named <= set(re.findall(r'commands\.add_parser\(\s*"(\w+)"', source))


def test_recipes_exist():
    from examples.recipes import RECIPES

    row = next(line for line in README.splitlines() if line.startswith("| `--recipe`"))
    named = set(re.findall(r"`(\w+)`", row))
    assert named and named <= RECIPES.keys()


def test_public_names_exist():
    names = {name for text in (*SPANS, *(code for _, code in FENCED)) for name in NAME.findall(text)}
    assert {"gemattn.jagged_attention", "gemattn.nn.EventEncoder"} <= names
    for name in names:
        value = gemattn
        for part in name.split(".")[1:]:
            assert hasattr(value, part), name
            value = getattr(value, part)


def test_every_public_name_is_mentioned():
    assert [name for name in gemattn.__all__ if name not in README and name != "Schedule"] == []


def table_after(heading: str) -> list[list[str]]:
    """Cells of the rows of the first table of a section."""
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def test_the_function_table_is_the_signature():
    parameters = inspect.signature(gemattn.jagged_attention).parameters
    listed: dict[str, str] = {}
    for names, values, _ in table_after("The function"):
        listed |= dict.fromkeys(re.findall(r"`(\w+)`", names), values)
    assert list(listed) == list(parameters)
    defaults = {name: p.default for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    shown = {**listed, "impl": listed["impl"].replace('"', "'")}
    for name, default in defaults.items():
        assert shown[name].startswith(f"`{default!r}`"), name


def test_the_implementations_are_those_of_the_package():
    listed = [row[0].strip('`"') for row in table_after("Implementations")]
    assert ["auto", *listed] == list(IMPLS)


def test_the_migration_table_names_real_parameters():
    ours = inspect.signature(gemattn.jagged_attention).parameters
    rows = table_after("Coming from elsewhere")
    named = {name for row in rows for name in re.findall(r"`(\w+)(?:=[^`]*)?`", row[2])}
    assert {"q_offsets", "kv_offsets", "scale", "window", "return_lse"} <= named
    assert named <= ours.keys()
    if importlib.util.find_spec("torch.nn.attention.varlen"):
        from torch.nn.attention.varlen import varlen_attn

        theirs = inspect.signature(varlen_attn).parameters
        named = {name for row in rows for name in re.findall(r"`(\w+)(?:=[^`]*)?`", row[1])}
        if "num_splits" in theirs:  # older ones lack a few
            assert named <= theirs.keys()


def test_environment_variables_are_read():
    section = README.split("\n## Environment variables\n")[1].split("\n## ")[0]
    sources = "".join(path.read_text() for path in (ROOT / "gemattn").rglob("*.py"))
    named = re.findall(r"^- `(\w+)=1`", section, re.MULTILINE)
    assert named
    for name in named:
        assert name in sources, name


def test_links_lead_somewhere():
    headings = re.findall(r"^#+ (.*)$", PROSE, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    targets = re.findall(r"\[[^\]]+\]\(([^)]+)\)", PROSE)
    assert targets
    for target in targets:
        path, _, anchor = target.partition("#")
        if path:
            assert (ROOT / path).exists(), target
        else:
            assert anchor in anchors, target


def test_urls_are_few():
    assert set(re.findall(r"https?://[^\s)`>]+", README)) <= URLS


def test_versions_are_those_of_the_package():
    metadata = (ROOT / "pyproject.toml").read_text()
    assert 'dependencies = ["torch>=2.11,<2.14"]' in metadata and "torch 2.11 to 2.13" in " ".join(README.split())
    assert '"torchrec>=1.6,<1.9"' in metadata and "TorchRec 1.6 to 1.8" in " ".join(README.split())
    assert 'requires-python = ">=3.11,<3.14"' in metadata and "Python 3.11 to 3.13" in README
    pinned = (ROOT / "requirements/triton.txt").read_text()
    (command,) = re.findall(r"pip install --no-deps (\S+)", README)
    assert command in pinned.splitlines()
    extras = metadata.split("[project.optional-dependencies]")[1].split("\n[")[0]
    names = re.findall(r"^(\w+) =", extras, re.MULTILINE)
    sentence = " ".join(README.split()).split("Extras are ")[1].split(": `pip")[0]
    assert re.findall(r"`(\w+)`", sentence) == names
