"""The shape of the source: imports point down the layers, modules and functions stay short.

The layers are those of docs/architecture.md; a module that none of them names is a failure.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mpifleet"
LAYERS = {
    "vocabulary": "_version array_bytes errors launchenv log partition paths patience "
    "private_directory strategy "
    "strategy_build strategy_configs strategy_fields strategy_file strategy_kinds "
    "strategy_rules strategy_table states "
    "memory_reuse step_clock",
    "MPI": "lifeline meeting mpi ranklog roles watch window",
    "mechanisms": "checkpoint data metrics portable ps state_gathering",
    "exchanges": "allreduce exchange geo ps.exchange ps.local_exchange thread_exchange thread_mean",
    "training": "embedding inference job_states local_state look_up model_names model_tables "
    "models optimizer progress pull_ahead random_states state_dicts step_marks table_options "
    "training_threads",
    "face": "compose current exports fleet persistables preemption resume resuming role_makers "
    "saves session util",
    "programs": "__main__ cli",
}
HEIGHT = {
    f"mpifleet.{name}": height
    for height, names in enumerate(LAYERS.values())
    for name in names.split()
}
HEIGHT["mpifleet"] = list(LAYERS).index("face")
MAX_MODULE_LINES = 300
MAX_FUNCTION_LINES = 40
# The few longer modules, each with the lines it may have and why it is not cut.
LONG_MODULES: dict[str, int] = {}
# Names of longer functions, each with the reason why cutting it would not help; none at present.
LONG_FUNCTIONS: dict[str, str] = {}
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in FILES}


def height(module: str) -> int:
    """The layer of a module: that of the longest name in the table that it stands under."""
    parts = module.split(".")
    for length in range(len(parts), 1, -1):
        if (name := ".".join(parts[:length])) in HEIGHT:
            return HEIGHT[name]
    if module == "mpifleet":
        return HEIGHT[module]
    pytest.fail(f"{module} stands in no layer; name it in LAYERS")


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of all modules that a tree imports at run time, inside functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES or full == "mpi4py.MPI" else node.module
        else:
            yield from imports(node)


def each(trees: dict[Path, ast.Module]) -> list:
    return [
        pytest.param(path, tree, id=str(path.relative_to(ROOT))) for path, tree in trees.items()
    ]


@pytest.mark.parametrize(("path", "tree"), each(TREES))
def test_imports_point_down(path, tree):
    mine = height(module_name(path))
    names = list(LAYERS)
    for imported in imports(tree):
        if imported.split(".")[0] == "mpifleet" and imported != "mpifleet":
            theirs = height(imported)
            assert theirs <= mine, (
                f"{path.relative_to(ROOT)} ({names[mine]}) imports {imported} ({names[theirs]})"
            )


@pytest.mark.parametrize(("path", "tree"), each(TREES))
def test_foreign_imports_have_one_place(path, tree):
    found = set(imports(tree))
    tops = {name.split(".")[0] for name in found}
    if path != PACKAGE / "mpi.py":
        assert "mpi4py.MPI" not in found, "only mpifleet/mpi.py imports mpi4py.MPI"
    if PACKAGE / "checkpoint" not in path.parents:
        assert "h5py" not in tops, "only mpifleet/checkpoint imports h5py"
    assert "pickle" not in tops
    layer = list(LAYERS)[height(module_name(path))]
    allowed = {
        "vocabulary": {"numpy", "yaml", "mpifleet"},
        "MPI": {"numpy", "mpi4py", "mpifleet"},
        "programs": {"numpy", "rich", "mpifleet"},
    }.get(layer)
    if allowed is not None:
        foreign = tops - allowed - set(sys.stdlib_module_names)
        assert not foreign, f"the layer {layer!r} imports {sorted(foreign)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_are_short(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LONG_MODULES.get(str(path.relative_to(ROOT)), MAX_MODULE_LINES)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("folder", ["mpifleet", "examples", "benchmarks", "tools"])
def test_functions_are_short(folder):
    lines_of = {
        f"{path.relative_to(ROOT)}: {function.name}": function.end_lineno - function.lineno + 1
        for path in sorted((ROOT / folder).rglob("*.py"))
        for function in functions(ast.parse(path.read_text(encoding="utf-8")))
    }
    long = {name: lines for name, lines in lines_of.items() if lines > MAX_FUNCTION_LINES}
    assert long.keys() == {name for name in LONG_FUNCTIONS if name.startswith(folder)}, long


def undocumented(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    for node in body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        # A setter shares the docstring of its property.
        setter = any(isinstance(d, ast.Attribute) for d in node.decorator_list)
        if ast.get_docstring(node) is None and not setter:
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from undocumented(node.body, f"{prefix}{node.name}.")


@pytest.mark.parametrize(("path", "tree"), each(TREES))
def test_public_names_have_docstrings(path, tree):
    assert ast.get_docstring(tree), "the module says nothing about itself"
    assert not list(undocumented(tree.body))


def test_no_module_has_an_empty_name():
    vague = {"utils", "helpers", "manager", "common", "misc"}
    assert vague.isdisjoint(path.stem for path in FILES)


@pytest.mark.parametrize("folder", ["tests/mpi", "tests/probes"])
def test_every_file_of_the_mpi_suite_is_collected(folder):
    """pytest collects test_*.py alone; a test function elsewhere would never run."""
    for path in (ROOT / folder).rglob("*.py"):
        names = [f.name for f in functions(ast.parse(path.read_text(encoding="utf-8")))]
        tests = [name for name in names if name.startswith("test_")]
        assert bool(tests) == path.name.startswith("test_"), path
