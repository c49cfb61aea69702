"""Architecture rules: allowed imports, and steps that fit on one screen."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import grimp
import pytest
from full import FULL

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "strobe"
CORE = ("engine", "speculation", "runner", "models", "kv", "sampling", "text")
STEP_LINES = 30


def loaded_by(statement: str) -> set[str]:
    """Return the modules that a statement loads in a fresh interpreter."""
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """Return the import graph of running code; a package stands for its __init__ only."""
    return grimp.build_graph("strobe", exclude_type_checking_imports=True, cache_dir=None)


def test_import_contracts_hold():
    tool = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run(
        [tool, "--no-cache", "--config", str(ROOT / "pyproject.toml")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize("name", ["step", "launch"])
def test_step_fits_on_one_screen(name: str):
    tree = ast.parse((PACKAGE / "engine" / "engine.py").read_text(encoding="utf-8"))
    (engine,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Engine"]
    (method,) = [n for n in engine.body if isinstance(n, ast.FunctionDef) and n.name == name]
    assert method.end_lineno is not None
    assert method.end_lineno - method.lineno + 1 <= STEP_LINES


def imported_by_name() -> dict[str, set[str]]:
    """Return the package's modules that each module imports by `import_module("strobe...")`."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        names = re.findall(r'import_module\("(strobe\.[\w.]+)"\)', path.read_text(encoding="utf-8"))
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[module.removesuffix(".__init__")] = set(names)
    return found


def test_modules_have_no_import_cycles(graph: grimp.ImportGraph):
    seen: dict[str, int] = {}
    by_name = imported_by_name()

    def visit(module: str, path: tuple[str, ...]) -> None:
        seen[module] = 1
        direct = graph.find_modules_directly_imported_by(module)
        for imported in sorted(direct | by_name.get(module, set())):
            assert seen.get(imported) != 1, " -> ".join((*path, module, imported))
            if imported not in seen:
                visit(imported, (*path, module))
        seen[module] = 2

    for module in sorted(graph.modules):
        if module not in seen:
            visit(module, ())
    assert len(seen) > 30


def test_importing_the_package_loads_no_torch():
    loaded = loaded_by("import strobe")
    assert "strobe" in loaded
    assert not {"torch", "transformers", "numpy"} & loaded


def test_public_names_load_lazily():
    loaded = loaded_by("import strobe\nstrobe.SamplingParams\nstrobe.EngineConfig")
    assert "torch" not in loaded
    assert "strobe.llm" in loaded_by("import strobe\nstrobe.LLM")


@pytest.mark.parametrize("outside", ["tools", "demo_models", "cli", "server"])
def test_engine_does_not_import_outer_packages(graph: grimp.ImportGraph, outside: str):
    around = {m for m in graph.modules if m.split(".")[1:2] == [outside]}
    for room in CORE:
        for module in {m for m in graph.modules if m.split(".")[1:2] == [room]}:
            reached = graph.find_upstream_modules(module)
            assert not reached & around, module


def test_engine_loads_no_outer_packages():
    loaded = loaded_by("import strobe.engine.engine")
    rooms = {name.split(".")[1] for name in loaded if name.startswith("strobe.")}
    assert rooms >= {"engine", "speculation", "runner", "models", "kv", "sampling"}
    assert not rooms & {"tools", "demo_models", "cli", "server", "llm", "text"}
    assert "transformers" not in loaded


def test_drafting_methods_are_named_only_in_their_registry():
    """Checks like `if method == "dflash"` elsewhere would add a branch per drafter."""
    chosen = {"config.py", "sampling_params.py", "engine/engine.py"}
    named: set[str] = set()
    files = [path for room in CORE for path in (PACKAGE / room).rglob("*.py")]
    files += [
        PACKAGE / name for name in ("config.py", "request.py", "sampling_params.py", "step.py")
    ]
    for path in files:
        if path.parent.name == "config_readers":
            continue
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        words = {node.value for node in nodes if isinstance(node, ast.Constant)}
        if words & {"dflash", "ngram"} and path.parent.name != "speculation":
            named.add(path.relative_to(PACKAGE).as_posix())
    assert named
    assert named <= chosen


def test_full_table_names_existing_tests():
    """A pattern begins with a part of a test's name or of a parameter's id."""
    for path, patterns in FULL.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        for pattern in patterns:
            beginning = re.split(r"[^\w ']", pattern)[0]
            assert beginning in text, f"{path} has no test whose name matches {pattern!r}"
