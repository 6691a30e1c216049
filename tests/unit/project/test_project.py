"""What the whole tree keeps to, whatever it does: its sizes, its one door, its clean text."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from elastic_ring import errors
from elastic_ring.files import cut, few

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "elastic_ring"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_FUNCTION_LINES = 70
MAX_FILES_OF_A_FOLDER = 17
MAY_READ_ENVIRONMENT = {"config.py", "runtime/environment.py"}
SETS_ENVIRONMENT = "runtime/agent/launch.py"  # of the Python that it becomes; it runs without the package
MAY_PRINT = {"monitor/report.py"}  # besides the command line
PRINTING_ROOMS = ("cli/", "tuning/")
STANDS_FOR_THE_USERS_OWN = {"runtime/worker/faults.py PlannedError"}
TEXT_SUFFIXES = {".cfg", ".json", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml", ""}


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def in_repository() -> list[Path]:
    """The text files that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no git checkout here: {error}")
    paths = [ROOT / item for item in listed.split("\0") if item]
    return sorted(path for path in paths if path.suffix in TEXT_SUFFIXES and path.is_file())


def environment_reads(module: ast.Module) -> Iterator[int]:
    """Lines that touch the process's environment through `os`, however it was imported."""
    for node in ast.walk(module):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names = [alias.name for alias in node.names]
        if {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"} & set(names):
            yield node.lineno


def prints(module: ast.Module) -> Iterator[int]:
    """Lines that print, or write to the terminal's streams behind print's back."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield node.lineno
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"sys.stdout.write", "sys.stderr.write"}:
            yield node.lineno


def test_there_is_a_package_to_check():
    assert len(MODULES) > 10


def test_no_function_of_the_package_is_over_70_lines():
    too_long = [
        f"{name(path)}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1} lines"
        for path in MODULES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert too_long == []


def test_the_trainer_stays_a_door():
    """Counted as a reader meets them: imports in functions, too."""
    door = PACKAGE / "trainer.py"
    imported = {node.module for node in ast.walk(tree(door)) if isinstance(node, ast.ImportFrom)}
    assert len([module for module in imported if (module or "").startswith("elastic_ring")]) <= 15
    assert len(door.read_text(encoding="utf-8").splitlines()) < 250


def test_no_folder_has_more_files_than_a_reader_takes_in():
    folders = Counter(path.parent.relative_to(ROOT).as_posix() for path in in_repository())
    assert folders["elastic_ring/control"] > 10
    assert {folder: count for folder, count in folders.items() if count > MAX_FILES_OF_A_FOLDER} == {}


def test_every_module_says_what_it_is_for():
    """An empty `__init__.py` only makes a folder a package and need not speak."""
    modules = {name(path): tree(path) for path in MODULES}
    silent = [path for path, module in modules.items() if module.body and not ast.get_docstring(module)]
    assert silent == []


def test_the_environment_is_read_in_one_place():
    readers = {name(path): lines for path in MODULES if (lines := list(environment_reads(tree(path))))}
    assert readers.pop(SETS_ENVIRONMENT)
    assert set(readers) <= MAY_READ_ENVIRONMENT, readers
    assert len(readers) <= 1, f"one place, not several: {readers}"


def test_json_of_others_is_read_in_one_place():
    """`plain_json` bounds its size and depth. What a process wrote for itself is read as it is."""
    own = ("control/", "forecast/", "files.py", "integrations/transformers/model.py")
    own += ("integrations/transformers/first_values.py", "integrations/transformers/lora.py", "runtime/agent/launch.py")
    readers = [
        f"{name(path)}:{node.lineno}"
        for path in MODULES
        if not name(path).startswith(own)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.loads", "json.load")
        if "json.dumps(" not in ast.unparse(node.args[0])
    ]
    assert not readers, readers


def test_only_the_terminal_report_prints():
    printers = {name(path): lines for path in MODULES if (lines := list(prints(tree(path))))}
    assert {path for path in printers if not path.startswith(PRINTING_ROOMS)} <= MAY_PRINT, printers


@pytest.mark.parametrize(
    ("find", "source"),
    [
        (environment_reads, "import os\nx = os.environ['A']"),
        (environment_reads, "import os\nx = os.getenv('A')"),
        (environment_reads, "from os import environ"),
        (prints, "print('x')"),
        (prints, "import sys\nsys.stderr.write('x')"),
    ],
)
def test_the_searches_find_what_they_look_for(find, source):
    assert list(find(ast.parse(source)))


ERRORS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.ElasticRingError) and kind.__module__ == errors.__name__
]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_comes_back_whole_from_a_pickle(kind):
    error = kind("rank 3 died", step=21, worker="w-3", ranks=(1, 2))
    error.add_note("while it healed")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert str(back) == "rank 3 died"
    assert (back.message, back.facts) == (error.message, error.facts)


def test_every_error_of_the_package_is_in_the_one_tree():
    """A class elsewhere with a root of its own would slip past `except ElasticRingError`."""
    roots = {"Exception", "BaseException", "RuntimeError", "OSError", "ValueError", "TypeError", "KeyError"}
    strays = [
        f"{name(path)} {node.name}"
        for path in MODULES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
        and name(path) != "errors.py"
        and roots & {base.id for base in node.bases if isinstance(base, ast.Name)}
    ]
    assert set(strays) <= STANDS_FOR_THE_USERS_OWN


def from_the_package(value: object) -> bool:
    """Defined in elastic_ring, and no module of it."""
    return str(getattr(value, "__module__", "")).split(".")[0] == "elastic_ring"


@pytest.fixture(scope="module")
def door() -> ModuleType:
    return importlib.import_module("elastic_ring")


def test_each_public_name_is_exported_once(door):
    names = list(door.__all__)
    assert len(names) == len(set(names))
    objects = [getattr(door, item) for item in names]
    assert len({id(value) for value in objects}) == len(objects), "one thing under two names"
    ours = {item for item, value in vars(door).items() if from_the_package(value)}
    extra = {item for item in ours if not item.startswith("_")} - set(names)
    assert extra == set(), "public by accident: add to __all__ or import under a private name"


def test_what_is_exported_is_ours_and_documented(door):
    for item in door.__all__:
        value = getattr(door, item)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert from_the_package(value), item
            assert inspect.getdoc(value), f"{item} has no docstring"


def test_no_file_names_this_machine():
    """Computed, not listed: whatever machine runs this, its own paths and name must not be in the text."""
    words = [str(ROOT), str(Path.home()) + "/", sys.prefix]
    if len(socket.gethostname()) > 8:
        words.append(socket.gethostname())
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in in_repository()
        for word in words
        if word in path.read_text(encoding="utf-8")
    ]
    assert found == []


def test_no_unfinished_work_is_left_in_the_text():
    stray = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b|\bbreak" + r"point\(|\bpdb\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in in_repository()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if stray.search(line)
    ]
    assert found == []


def test_the_first_are_named_and_the_others_counted():
    assert few([], 2) == ""
    assert few(["a", 2], 2) == "a, 2"
    assert few("abcd", 2, "; ") == "a; b and 2 more"
    assert (cut("abc", 3), cut("abcd", 3)) == ("abc", "abc...")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_the_package_compiles_without_a_warning(version, tmp_path):
    own = {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "", "PYENV_VERSION": version}
    python, environment = shutil.which(f"python{version}"), {**os.environ, **own}
    if python is None or subprocess.run([python, "-V"], env=environment, capture_output=True).returncode:
        pytest.skip(f"no python{version}")
    command = [python, "-W", "error", "-m", "compileall", "-q", "elastic_ring"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
