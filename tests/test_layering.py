"""The layers of docs/design.md, section 5, held against the imports and names in the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 400
# The whole protocol is to be read on one page.
LONG_ON_PURPOSE = {"wire/messages.py": 710}

OURS = {"wire", "speculation", "engine", "node_draft", "node_verify", "relay", "infra"}
# Import name of everything that is neither ours nor the standard library's: what each package may use besides that.
# The design's table, and beyond it: numpy where tensors are, safetensors and the hub for checkpoints, ConfigArgParse
# where settings are read, and the websockets shell in `wire/aio` alone.
ALLOWED: dict[str, set[str]] = {
    "wire": {"orjson", "configargparse"},
    "wire/aio": {"orjson", "websockets", "wire"},
    "speculation": {"wire"},
    "engine": {"torch", "transformers", "safetensors", "tokenizers", "huggingface_hub", "numpy", "speculation", "wire"},
    "node_draft": {"wire", "speculation", "engine", "configargparse", "torch", "numpy"},
    "node_verify": {"wire", "speculation", "engine", "configargparse", "torch", "numpy"},
    "relay": {"wire", "configargparse", "aiohttp", "pydantic", "orjson", "rich"},
    "infra": {"boto3", "botocore"},
}
# A pure core reads no clock, waits for nothing and knows no environment.
IMPURE = {"asyncio", "time", "os", "threading", "socket", "subprocess", "selectors", "concurrent", "signal"}
PURE_PACKAGES = {"speculation"}
PURE_MODULES = {
    "node_draft/frames.py",
    "node_draft/scheduler.py",
    "node_verify/scheduler.py",
    "node_verify/line.py",
    "node_verify/planning.py",
    "relay/router.py",
    "relay/books.py",
    "relay/kept.py",
    "relay/pairing.py",
    "relay/limits.py",
    "relay/actions.py",
}
# Models and their library stay out of what decides.
NO_TENSORS = PURE_MODULES | {"node_draft/node.py", "node_verify/node.py"}
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
SETTINGS_MODULES = {"__main__", "settings"}
CLI_MODULES = {"relay/client_cli.py"}


def source_files(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_modules(tree: ast.Module, package: str) -> Iterator[tuple[str, int]]:
    """Every absolute module name that a module imports, with its line; relative imports stay in `package`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (package if node.level else node.module or ""), node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            argument = node.args[0] if node.args else None
            name = argument.value if isinstance(argument, ast.Constant) else "<computed>"
            yield str(name), node.lineno


def layer_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return "wire/aio" if parts[:2] == ("wire", "aio") else parts[0]


def forbidden_imports(path: Path, tree: ast.Module) -> list[str]:
    """The imports in one file that the table does not allow."""
    layer, name = layer_of(path), relative(path)
    package = layer.split("/")[0]
    allowed = ALLOWED[layer] | {package}
    # asyncio belongs to the shell: the core of the wire is sans-IO.
    barred = IMPURE if package in PURE_PACKAGES or name in PURE_MODULES else {"asyncio"} if layer == "wire" else set()
    if name in NO_TENSORS:
        allowed -= {"torch", "transformers", "numpy"}
    if name in PURE_MODULES:
        allowed -= {"engine"}
    found = []
    for module, line in imported_modules(tree, package):
        top = module.split(".")[0]
        from_shell = layer != "wire/aio" and package == "wire" and module.startswith("wire.aio")
        known = top in allowed or (top in sys.stdlib_module_names and top not in barred)
        if not known or from_shell:
            found.append(f"{name}:{line} imports {module}")
    return found


def environment_reads(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if ast.unparse(node) in ("os.environ", "os.getenv", "os.environb"):
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (node.lineno for alias in node.names if alias.name in ("environ", "getenv", "environb"))


def print_calls(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("print", "pprint"):
            yield node.lineno


def test_every_package_of_ours_is_in_the_table_and_is_packaged() -> None:
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "scripts"}
    assert folders <= OURS
    assert {layer.split("/")[0] for layer in ALLOWED} == OURS
    pyproject = (ROOT / "pyproject.toml").read_text()
    for package in OURS:
        assert f'"{package}"' in pyproject


@pytest.mark.parametrize("package", sorted(OURS))
def test_imports_hold_the_table(package: str) -> None:
    assert (ROOT / package).is_dir()
    found = [line for path in source_files(package) for line in forbidden_imports(path, parsed(path))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "source", "num_found"),
    [
        ("relay/router.py", "import wire.messages\nfrom . import pairing\n", 0),
        ("relay/router.py", "import speculation\nimport asyncio\nimport engine.runner\n", 3),
        ("relay/server.py", "def f():\n    import torch\n", 1),
        ("wire/codec.py", "from wire.aio import link\n", 1),
        ("wire/codec.py", "import websockets\nimport asyncio\n", 2),
        ("wire/aio/shell.py", "import websockets, asyncio\nfrom wire import codec\n", 0),
        ("node_draft/node.py", "import node_verify.node\nfrom relay import router\nimport torch\n", 3),
        ("node_draft/scheduler.py", "from speculation.tree import Tree\nfrom wire import messages\n", 0),
        ("node_draft/scheduler.py", "import time\nfrom engine.runner import Runner\n", 2),
        ("speculation/tree.py", "import os\nimport importlib\nimportlib.import_module('torch')\n", 2),
        ("infra/vm.py", "import boto3\nimport wire\n", 1),
    ],
)
def test_the_checker_itself_finds_what_the_table_forbids(name: str, source: str, num_found: int) -> None:
    assert len(forbidden_imports(ROOT / name, ast.parse(source))) == num_found


@pytest.mark.parametrize("package", sorted({*OURS, "scripts"}))
def test_modules_are_short_and_named_for_what_they_hold(package: str) -> None:
    for path in source_files(package):
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        limit = LONG_ON_PURPOSE.get(relative(path), MAX_LINES)
        assert num_lines <= limit, f"{relative(path)} has {num_lines} lines: split it by responsibility"
        assert not {path.stem, *path.relative_to(ROOT).parts} & FORBIDDEN_NAMES, relative(path)


@pytest.mark.parametrize("package", sorted(OURS))
def test_the_environment_is_read_only_where_settings_are(package: str) -> None:
    found = [
        f"{relative(path)}:{line}"
        for path in source_files(package)
        if path.stem not in SETTINGS_MODULES
        for line in environment_reads(parsed(path))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("package", sorted(OURS))
def test_only_commands_print(package: str) -> None:
    found = [
        f"{relative(path)}:{line}"
        for path in source_files(package)
        if path.stem != "__main__" and relative(path) not in CLI_MODULES
        for line in print_calls(parsed(path))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("package", sorted(OURS - {"infra"}))
def test_nodes_and_relay_have_no_path_to_each_other(package: str) -> None:
    """Transitively, through our own packages: what the table allows must not add up to what it forbids."""
    reached, waiting = set[str](), [package]
    while waiting:
        current = waiting.pop()
        if current in reached:
            continue
        reached.add(current)
        for path in source_files(current):
            tops = {module.split(".")[0] for module, _ in imported_modules(parsed(path), current)}
            waiting.extend(tops & OURS)
    endpoints = {"node_draft", "node_verify", "relay"}
    assert reached & endpoints <= {package}
    if package in ("relay", "wire"):
        assert not reached & {"speculation", "engine"}


@pytest.mark.parametrize("package", ["wire", "relay"])
def test_a_fresh_interpreter_loads_all_of_it_without_models(package: str) -> None:
    modules = [
        relative(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for path in source_files(package)
        if path.stem != "__main__"
    ]
    code = f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\nprint(*sys.modules)"
    loaded = set(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True, timeout=60).split())
    assert set(modules) <= loaded
    assert not loaded & {
        "torch",
        "transformers",
        "numpy",
        "speculation",
        "engine",
        "node_draft",
        "node_verify",
        "boto3",
    }
    if package == "wire":
        assert "relay" not in loaded
