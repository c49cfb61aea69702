"""Architecture rules: allowed imports, steps that fit on one screen, and lines that breathe."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "strobe"
CORE = ("engine", "speculation", "runner", "models", "kv", "sampling", "text")
STEP_LINES = 30
MAX_POSITIONAL_FIELDS = 3
"""Fields of a record that may be built by position."""


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
        if path.parent.name == "config_readers" or path.name == "gguf.py":  # formats of files
            continue
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        words = {node.value for node in nodes if isinstance(node, ast.Constant)}
        if words & {"dflash", "ngram"} and path.parent.name != "speculation":
            named.add(path.relative_to(PACKAGE).as_posix())
    assert named
    assert named <= chosen


def test_folders_of_tests_hold_only_tests():
    """What several files of tests share is in a folder named `support`."""
    others = [
        path.relative_to(ROOT)
        for path in (ROOT / "tests").rglob("*.py")
        if path.parent.name != "support"
        and not path.name.startswith("test_")
        and path.name not in ("conftest.py", "__init__.py")
    ]
    assert others == []


@dataclass
class Module:
    """A parsed file of the package."""

    name: str
    path: Path
    tree: ast.Module

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree, collected once for the rules."""
        return list(ast.walk(self.tree))

    @cached_property
    def calls(self) -> list[ast.Call]:
        return [node for node in self.nodes if isinstance(node, ast.Call)]

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """The classes at the top of the module by their names."""
        return {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}

    @cached_property
    def imports(self) -> dict[str, list[tuple[str, str]]]:
        """Where each imported name comes from: (module, name there), inner imports included."""
        origins: dict[str, list[tuple[str, str]]] = {}
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    origin = (node.module, alias.name)
                    origins.setdefault(alias.asname or alias.name, []).append(origin)
        return origins


@cache
def modules() -> dict[str, Module]:
    """Return the package's modules by their names."""
    parsed: dict[str, Module] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(ROOT)
        name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        parsed[name] = Module(name, relative, ast.parse(path.read_text(encoding="utf-8")))
    return parsed


def packed_assignments(module: Module) -> Iterator[ast.Assign]:
    """Yield the assignments of several values to as many names, unless they swap them."""
    for node in module.nodes:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        for target in node.targets:
            if isinstance(target, ast.Tuple):
                names = sorted(ast.unparse(name) for name in target.elts)
                if names != sorted(ast.unparse(value) for value in node.value.elts):
                    yield node


def unpacked_tuples(module: Module) -> Iterator[ast.Call]:
    """Yield the calls that unpack a local name next to other arguments. A function may forward its
    own *args."""
    forwarded = {
        node.args.vararg.arg
        for node in module.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        and node.args.vararg is not None
    }
    for node in module.calls:
        if len(node.args) + len(node.keywords) < 2:
            continue
        stars = [arg.value for arg in node.args if isinstance(arg, ast.Starred)]
        if any(isinstance(value, ast.Name) and value.id not in forwarded for value in stars):
            yield node


def positional_records(module: Module) -> Iterator[ast.Call]:
    """Yield the calls that build a record of more than MAX_POSITIONAL_FIELDS fields by position."""
    owners = {node: owner.name for owner in module.classes.values() for node in ast.walk(owner)}
    for node in module.calls:
        if not node.args or not isinstance(node.func, ast.Name):
            continue
        called = node.func.id
        record = record_of(module, owners.get(node, called) if called == "cls" else called)
        unpacks = any(isinstance(argument, ast.Starred) for argument in node.args)
        if not unpacks and record and num_fields(*record) > MAX_POSITIONAL_FIELDS:
            yield node


def record_of(module: Module, name: str) -> tuple[Module, ast.ClassDef] | None:
    """Return the dataclass or named tuple that a module means by a name, and its own module."""
    if (node := module.classes.get(name)) is not None:
        return (module, node) if is_record(node) else None
    for source, original in module.imports.get(name, []):
        if source in modules():
            return record_of(modules()[source], original)
    return None


def is_record(node: ast.ClassDef) -> bool:
    kinds = [decorator_name(decorator) for decorator in node.decorator_list]
    is_dataclass = "dataclass" in kinds or "settings" in kinds
    return is_dataclass or "NamedTuple" in [ast.unparse(base) for base in node.bases]


def decorator_name(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


def num_fields(module: Module, node: ast.ClassDef) -> int:
    """Return the number of fields of a record, with those that it inherits."""
    own = sum(
        isinstance(part, ast.AnnAssign) and "ClassVar" not in ast.unparse(part.annotation)
        for part in node.body
    )
    bases = [record_of(module, ast.unparse(base)) for base in node.bases]
    return own + sum(num_fields(*base) for base in bases if base is not None)


PACKED_LINES = {
    "parallel assignment": packed_assignments,
    "unpacked local tuple": unpacked_tuples,
    "record built by position": positional_records,
}


@pytest.mark.parametrize("rule", PACKED_LINES)
def test_lines_are_not_packed(rule: str):
    packed = [
        f"{module.path}:{node.lineno}: {ast.unparse(node)}"
        for module in modules().values()
        for node in PACKED_LINES[rule](module)
    ]
    assert packed == []


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("parallel assignment", "a, b = 1, 2"),
        ("parallel assignment", "self.a, self.b = b, a"),
        ("unpacked local tuple", "f(*parts, x)"),
        ("unpacked local tuple", "f(*parts, key=x)"),
        ("record built by position", "Record(1, 2, 3, 4)"),
        ("record built by position", "Record(1, b=2)"),
        ("record built by position", "Derived(1, b=2)"),
    ],
)
def test_packed_line_is_found(rule: str, line: str):
    nodes = list(PACKED_LINES[rule](sample_module(line)))
    assert [ast.unparse(node) for node in nodes] == [ast.unparse(ast.parse(line))]


def test_packed_line_is_found_in_a_record_that_builds_itself():
    record = (
        "class Longer(Record):\n    e: int\n    def of(cls):\n        return cls(1, 2, 3, 4, 5)"
    )
    nodes = list(positional_records(sample_module(f"@dataclass\n{record}")))
    assert [ast.unparse(node) for node in nodes] == ["cls(1, 2, 3, 4, 5)"]


@pytest.mark.parametrize(
    "line",
    [
        "a, b = b, a",
        "a, b = pair",
        "f(*parts)",
        "f(*parts_of(x), y)",
        "def g(*values):\n    f(*values, x)",
        "Record(a=1, b=2, c=3, d=4)",
        "Small(1, 2, 3)",
    ],
)
def test_plain_line_is_not_packed(line: str):
    module = sample_module(line)
    assert not [node for rule in PACKED_LINES.values() for node in rule(module)]


def sample_module(line: str) -> Module:
    """Return a module with records of three and four fields, and a line."""
    text = (
        "class Small(NamedTuple):\n    a: int\n    b: int\n    c: int\n"
        "@dataclass(frozen=True)\nclass Record:\n    a: int\n    b: int\n    c: int\n    d: int\n"
        f"@dataclass\nclass Derived(Record):\n    kind: ClassVar[str]\n{line}\n"
    )
    return Module("sample", Path("sample.py"), ast.parse(text))
