"""The rules of the house: who may import whom, how long a file may be, what no file may hold."""

import ast
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "kvtiers"

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# Package -> the packages of kvtiers that it may import, besides itself.
LOWER = {"model"}
BELOW_PLANES = LOWER | {"cost", "observe"}
PLANES = BELOW_PLANES | {"control", "data"}
MAY_IMPORT = {
    "model": set(),
    "native": LOWER,
    "observe": LOWER,
    "cost": LOWER,
    "control": BELOW_PLANES,
    "data": BELOW_PLANES | {"native"},
    "connector": PLANES,
    "engines": PLANES | {"connector"},
    "simulate": PLANES | {"connector", "engines"},
    "bench": PLANES | {"connector", "engines"},
    "testing": PLANES | {"connector", "engines", "native"},
    "cli": PLANES | {"connector", "engines", "simulate", "bench", "native"},
    "__main__": {"cli"},
    "__init__": set(),
}

# Outside package -> patterns of the files that may import it.
GUARDED = {
    "torch": ("data/copier_*.py", "data/slab.py", "engines/**/*.py", "bench/**/*.py"),
    "vllm": ("engines/vllm/**/*.py",),
    "cupy": ("data/copier_*.py",),
    "kvtiers._native": ("native.py",),
}

# What `import kvtiers` and its pure packages must do without.
HEAVY = ("torch", "vllm", "cupy", "kvtiers._native")
PURE = ("kvtiers", "kvtiers.model", "kvtiers.control", "kvtiers.cost")


@dataclass(frozen=True)
class Source:
    """One parsed file of the package."""

    path: Path

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        return self.path.relative_to(PACKAGE).as_posix()

    @property
    def package(self) -> str:
        """The first part of the path: "model", or "__main__" for a file at the top."""
        return self.path.relative_to(PACKAGE).parts[0].removesuffix(".py")

    @property
    def module(self) -> tuple[str, ...]:
        """The dotted name, as parts."""
        parts = self.path.relative_to(REPOSITORY).with_suffix("").parts
        return parts[:-1] if parts[-1] == "__init__" else parts

    @cached_property
    def lines(self) -> list[str]:
        return self.path.read_text().splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse("\n".join(self.lines))

    def imports(self) -> Iterator[tuple[int, str]]:
        """Yield line and dotted name of everything imported, at any depth of the file."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._base(node)
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.Call) and _called(node) == "import_module":
                names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
                yield from ((node.lineno, name) for name in names if isinstance(name, str))

    def _base(self, node: ast.ImportFrom) -> str:
        """Return what stands between ``from`` and ``import``, without leading dots."""
        if not node.level:
            return node.module or ""
        here = self.module if self.path.name == "__init__.py" else self.module[:-1]
        parts = list(here[: len(here) - node.level + 1])
        return ".".join(parts + ([node.module] if node.module else []))


def _called(node: ast.Call) -> str:
    """Return the last name of what a call calls."""
    function = node.func
    return getattr(function, "attr", getattr(function, "id", ""))


SOURCES = [Source(path) for path in sorted(PACKAGE.rglob("*.py"))]
each_source = pytest.mark.parametrize("source", SOURCES, ids=str)


def test_every_package_has_an_import_rule():
    assert {source.package for source in SOURCES} <= set(MAY_IMPORT)


@each_source
def test_imports_point_downwards(source):
    allowed = MAY_IMPORT[source.package] | {source.package}
    wrong = []
    for line, name in source.imports():
        parts = name.split(".")
        if parts[0] != "kvtiers" or len(parts) < 2:
            continue
        target = parts[1]
        is_package = (PACKAGE / target).is_dir() or (PACKAGE / f"{target}.py").is_file()
        if is_package and target not in allowed:
            wrong.append(f"{source}:{line} imports {name}")
    assert not wrong


@each_source
def test_heavy_packages_stay_where_they_belong(source):
    wrong = [
        f"{source}:{line} imports {name}"
        for line, name in source.imports()
        for guarded, patterns in GUARDED.items()
        if f"{name}.".startswith(f"{guarded}.")
        if not any(_matches(source.name, pattern) for pattern in patterns)
    ]
    assert not wrong


def _matches(name: str, pattern: str) -> bool:
    folder, glob = pattern.split("**/") if "**/" in pattern else ("", pattern)
    return name.startswith(folder) and Path(name.removeprefix(folder)).match(glob)


@each_source
def test_file_is_short(source):
    assert len(source.lines) <= MAX_FILE_LINES


@each_source
def test_functions_are_short(source):
    long = [
        f"{source}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert not long


@each_source
def test_file_says_what_it_is_for(source):
    assert ast.get_docstring(source.tree)


@each_source
def test_library_code_does_not_print(source):
    wrong = [
        f"{source}:{node.lineno}"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert not wrong


@each_source
def test_exceptions_are_caught_by_name(source):
    wrong = [
        f"{source}:{node.lineno} {source.lines[node.lineno - 1].strip()}"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ExceptHandler) and _catches_all(node.type)
        if "# thread top" not in source.lines[node.lineno - 1] or node.type is None
    ]
    assert not wrong


def _catches_all(caught: ast.expr | None) -> bool:
    if caught is None:
        return True
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    names = {getattr(kind, "attr", getattr(kind, "id", "")) for kind in kinds}
    return bool(names & {"Exception", "BaseException"})


@each_source
def test_environment_is_read_in_one_place(source):
    names = {"environ", "environb", "getenv", "getenvb"}
    wrong = [
        f"{source}:{node.lineno}"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and node.attr in names
        if isinstance(node.value, ast.Name) and node.value.id == "os"
    ]
    # The other reads none: it hands its own environment on to the engine's process.
    assert source.name in ("model/config.py", "bench/engine_process.py") or not wrong


# What importing costs

BLOCK_AND_IMPORT = """
import importlib, pkgutil, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        for heavy in {heavy!r}:
            if name == heavy or name.startswith(heavy + "."):
                raise ImportError(name + " is blocked")

if {blocked!r}:
    sys.meta_path.insert(0, Blocked())
for name in {names!r}:
    module = importlib.import_module(name)
    if name != "kvtiers":
        for found in pkgutil.walk_packages(module.__path__, name + "."):
            importlib.import_module(found.name)
loaded = [name for name in {heavy!r} if name in sys.modules]
assert not loaded, loaded
"""


@pytest.mark.parametrize("blocked", [False, True], ids=["present", "blocked"])
@pytest.mark.parametrize("names", [("kvtiers",), PURE], ids=["kvtiers", "pure packages"])
def test_import_needs_no_engine_gpu_or_compiled_module(names, blocked):
    _run(BLOCK_AND_IMPORT.format(heavy=HEAVY, names=names, blocked=blocked))


def test_command_line_starts_without_numpy_or_schema():
    heavy = (*HEAVY, "numpy", "pydantic", "yaml")
    code = "import sys, kvtiers.cli.main\n"
    code += f"loaded = [name for name in {heavy!r} if name in sys.modules]\n"
    _run(code + "assert not loaded, loaded\n")


def _run(code: str) -> None:
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr


# What is committed

# Put together from parts, so that this file does not find itself.
PERSONAL = re.compile(
    r"(?<![\w.-])/(?:(?:" + "|".join(("home", "Users", "workspaces?")) + r")/[\w.-]+/|root" + "/)"
)
SHARED_FOLDERS = {"/", "/data", "/etc", "/mnt", "/opt", "/srv", "/tmp", "/usr", "/var"}


def _tracked_files() -> list[Path]:
    git = shutil.which("git")
    if git is None or not (REPOSITORY / ".git").exists():
        pytest.skip("not a git checkout")
    command = [git, "-C", str(REPOSITORY), "ls-files", "-z"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    paths = [REPOSITORY / name for name in result.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def _folders_of_this_machine() -> set[str]:
    """Return the folders in which this checkout and its interpreter happen to lie."""
    folders = {REPOSITORY, REPOSITORY.parent, Path.home(), Path(tempfile.gettempdir())}
    if sys.prefix != sys.base_prefix:
        folders.add(Path(sys.prefix))
    return {str(folder) for folder in folders} - SHARED_FOLDERS


def test_committed_files_hold_no_path_of_a_developers_machine():
    here = "|".join(re.escape(folder) for folder in sorted(_folders_of_this_machine()))
    local = re.compile(rf"(?<![\w.-])(?:{here})(?![\w-])") if here else PERSONAL
    leaks = []
    for path in _tracked_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # an image or another binary file
        for number, line in enumerate(lines, start=1):
            found = PERSONAL.search(line) or local.search(line)
            if found:
                leaks.append(f"{path.relative_to(REPOSITORY)}:{number}: {found.group()}")
    assert not leaks


def test_personal_paths_are_recognised():
    for folder in ("home", "Users"):
        assert PERSONAL.search(f"see /{folder}/someone/notes")
    assert not PERSONAL.search("https://example.org/home/page/")
    assert not PERSONAL.search("/mnt/nvme0/kv")
