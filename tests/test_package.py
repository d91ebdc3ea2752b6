"""The package as it installs: editable, as a wheel, its pins, and which part may import which."""

import ast
import importlib.metadata
import json
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Where the packages lie in the tree -> where they are installed.
SOURCES = {
    "megatron_adacc": "megatron_adacc",
    "configs": "megatron_adacc/configs",
    "kernels": "megatron_adacc/kernels",
    "patches": "megatron_adacc/patches",
}
IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")


def run_python(code: str, cwd: Path, python: str | Path = sys.executable) -> list[str]:
    """The lines that `python -c code` prints in the folder `cwd`; fails with its stderr if it fails."""
    result = subprocess.run([python, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def installed_sources() -> set[str]:
    """The path that each source file has when it is installed, relative to site-packages."""
    return {
        str(installed / path.relative_to(ROOT / source))
        for source, installed in ((source, Path(target)) for source, target in SOURCES.items())
        for pattern in ("*.py", "*.yaml")
        for path in (ROOT / source).rglob(pattern)
    }


# ---- pyproject.toml ----


def test_the_listed_packages_are_those_of_the_tree():
    in_tree = {str(Path(path).parent).replace("/", ".") for path in installed_sources()}
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == sorted(in_tree)


def test_every_package_has_an_init():
    missing = {str(Path(path).parent / "__init__.py") for path in installed_sources()} - installed_sources()
    assert missing == set()


def test_the_version_is_the_same_everywhere():
    import megatron_adacc

    assert megatron_adacc.__version__ == PYPROJECT["project"]["version"]
    assert importlib.metadata.version("megatron-adacc") == PYPROJECT["project"]["version"]


# ---- requirements.lock ----


def read_lock() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    assert all(len(pin) == 2 for pin in pins)
    assert len({name for name, _ in pins}) == len(pins)
    return dict(pins)


@pytest.fixture(scope="module")
def lock_script():
    """The functions of scripts/lock.py."""
    return runpy.run_path(str(ROOT / "scripts" / "lock.py"))


def test_every_declared_requirement_is_pinned_to_a_version_that_satisfies_it(lock_script):
    lock = read_lock()
    requirements = lock_script["declared_requirements"](ROOT)
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert len(requirements) == (
        len(PYPROJECT["project"]["dependencies"])
        + len(PYPROJECT["build-system"]["requires"])
        + sum(len(extra) for extra in extras.values())
    )
    for requirement in requirements:
        pinned = lock[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pinned), f"{requirement} against {pinned}"


def follows_the_torch_build(name: str) -> bool:
    """CUDA libraries: another build of torch than the locked one brings others."""
    return name.startswith(("nvidia-", "cuda-"))


def test_this_environment_is_the_locked_one(lock_script):
    lock = read_lock()
    closure = lock_script["installed_closure"](lock_script["declared_requirements"](ROOT))
    locked_torch_build = Version(importlib.metadata.version("torch")).local is None
    expected = {
        name: version for name, version in closure.items() if locked_torch_build or not follows_the_torch_build(name)
    }
    assert {name: lock.get(name) for name in expected} == expected


def test_the_lock_pins_nothing_else(lock_script):
    closure = lock_script["installed_closure"](lock_script["declared_requirements"](ROOT))
    superfluous = {name for name in read_lock() if name not in closure and not follows_the_torch_build(name)}
    assert superfluous == set()


def test_the_closure_follows_extras_and_leaves_unused_ones(lock_script):
    closure = lock_script["installed_closure"]
    assert "matplotlib" in closure([Requirement("megatron-adacc[plots]")])
    assert "matplotlib" not in closure([Requirement("megatron-adacc")])
    assert set(closure([Requirement("rich")])) == {"rich", "markdown-it-py", "mdurl", "pygments"}


# ---- what importing costs, and what installs ----


@pytest.mark.parametrize("module", ["megatron_adacc", "megatron_adacc.cli", "megatron_adacc.kernels"])
def test_importing_imports_neither_torch_triton_ortools_nor_megatron(module, tmp_path):
    lines = run_python(f"import sys, {module}; print(*sorted(sys.modules), sep='\\n')", tmp_path)
    assert module in lines
    top_packages = {line.partition(".")[0] for line in lines}
    assert top_packages & {"torch", "triton", "ortools", "megatron", "transformers", "apex"} == set()


@pytest.mark.parametrize("in_checkout", [True, False])
def test_the_editable_install_finds_the_folders_of_the_checkout(in_checkout, tmp_path):
    code = (
        "import megatron_adacc\n"
        "from megatron_adacc import configs, kernels, patches\n"
        "for module in (megatron_adacc, configs, kernels, patches): print(module.__file__)"
    )
    assert run_python(code, ROOT if in_checkout else tmp_path) == [
        str(ROOT / folder / "__init__.py") for folder in SOURCES
    ]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy of the tree, offline."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree)
    for name in SOURCES:
        shutil.copytree(ROOT / name, tree / name, ignore=IGNORED)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(tree)]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_every_source_file_and_nothing_beside_the_package(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    version = PYPROJECT["project"]["version"]
    assert wheel.name == f"megatron_adacc-{version}-py3-none-any.whl"
    metadata = f"megatron_adacc-{version}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"megatron_adacc", metadata}
    assert {name for name in names if not name.startswith(metadata)} == installed_sources()


@pytest.fixture(scope="module")
def wheel_venv(wheel, tmp_path_factory) -> Path:
    """A fresh venv with the wheel in it, which sees the dependencies that the tests run with."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    (site_packages,) = run_python("import sysconfig; print(sysconfig.get_path('purelib'))", folder, python)
    # A path in a .pth file makes packages importable; the .pth files in there, the editable install's
    # among them, are not read.
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (Path(site_packages) / "dependencies.pth").write_text("".join(f"{path}\n" for path in sorted(paths)))
    return folder


def test_the_wheel_works_where_there_is_no_checkout(wheel_venv, tmp_path):
    code = (
        "import importlib.util, megatron_adacc\n"
        "from megatron_adacc import configs, kernels, patches\n"
        "for module in (megatron_adacc, configs, kernels, patches): print(module.__file__)\n"
        "print(importlib.util.find_spec('kernels'), importlib.util.find_spec('patches'))"
    )
    *files, strays = run_python(code, tmp_path, wheel_venv / "bin" / "python")
    assert strays == "None None"
    (site_packages,) = {path.parent for path in wheel_venv.glob("lib/python3*/site-packages/megatron_adacc")}
    assert files == [str(site_packages / folder / "__init__.py") for folder in SOURCES.values()]


def test_the_doctor_runs_from_the_wheel(wheel_venv, tmp_path):
    report = tmp_path / "report.json"
    command = [wheel_venv / "bin" / "adacc", "doctor", "--json", str(report)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    machine = json.loads(report.read_text())["machine"]
    assert machine["adacc_location"].startswith(str(wheel_venv))
    assert machine["setup_script"] is None
    assert machine["python_path"] == str(wheel_venv / "bin" / "python")


def test_transformers_works_with_the_checkout_first_on_the_path():
    # transformers looks for a package named `kernels` and finds our folder of that name.
    code = (
        "import sys, torch\n"
        "from transformers import AutoTokenizer, PreTrainedTokenizerFast, GPT2Config, GPT2LMHeadModel\n"
        "import kernels; print(kernels.__file__)\n"
        "sizes = dict(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)\n"
        "model = GPT2LMHeadModel(GPT2Config(**sizes))\n"
        "print(tuple(model(torch.zeros(1, 4, dtype=torch.long)).logits.shape))"
    )
    assert run_python(code, ROOT) == [str(ROOT / "kernels" / "__init__.py"), "(1, 4, 16)"]


# ---- which part may import which (DESIGN: arrows point one way) ----

# "base" are the modules that lie directly in megatron_adacc/, which every part may import; "facade" is
# megatron_adacc/__init__.py, which hands out the public API when it is asked for.
ARROWS: dict[str, set[str]] = {
    "facade": {"runtime", "adaptive"},
    "base": set(),
    "planner": set(),
    "graph": set(),
    "devices": set(),
    "configs": set(),  # YAML
    "patches": set(),
    "codecs": {"kernels"},  # two halves of one thing: a codec loads its kernel by name, and the
    "kernels": {"codecs"},  # kernel's launcher knows the codec's parameters
    "cost": {"graph", "codecs", "planner"},
    "runtime": {"graph", "codecs", "planner", "cost"},
    "adaptive": {"runtime", "planner", "codecs", "graph", "cost"},
    "optim": {"codecs"},
    "adapters": set(),
    "megatron": {
        "adapters",
        "graph",
        "cost",
        "planner",
        "codecs",
        "runtime",
        "adaptive",
        "devices",
        "optim",
        "patches",
        "kernels",
    },
}
# Outside package -> the parts that may import it.
OUTSIDE: dict[str, set[str]] = {
    "megatron": {"megatron", "patches"},
    "torch": set(ARROWS) - {"planner", "base", "facade"},
    "triton": {"kernels"},
    "ortools": {"planner"},
    "transformers": {"megatron"},
    "tokenizers": {"megatron"},
}


def part_of(module: str) -> str:
    """The part that a module of ours belongs to: megatron_adacc.graph.trace -> graph."""
    if module == "megatron_adacc":
        return "facade"
    names = module.split(".")
    return names[1] if len(names) > 1 and names[1] in ARROWS else "base"


def imported_modules(path: Path, module: str) -> set[str]:
    """The full names of what the file `path`, which is `module`, imports anywhere in it."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                parents = package.split(".")
                source = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [source])])
            # The names may be modules: from megatron_adacc import graph.
            imported.update(f"{source}.{alias.name}" for alias in node.names)
    return imported


def violations(path: Path, module: str) -> list[str]:
    """Every import in the file that the arrows forbid, in words."""
    part = part_of(module)
    found = []
    for name in sorted(imported_modules(path, module)):
        top_package = name.partition(".")[0]
        if top_package == "megatron_adacc" and part_of(name) not in {"base", "facade", part, *ARROWS[part]}:
            found.append(f"{module} ({part}) imports {name}")
        if part not in OUTSIDE.get(top_package, {part}):
            found.append(f"{module} ({part}) imports {name}")
    return found


def test_imports_follow_the_arrows():
    found = []
    for source, installed in SOURCES.items():
        for path in (ROOT / source).rglob("*.py"):
            inside = Path(installed) / path.relative_to(ROOT / source).with_suffix("")
            module = ".".join(inside.parts).removesuffix(".__init__")
            found.extend(violations(path, module))
    assert found == []


def test_every_folder_is_a_part_with_arrows():
    folders = {path.parts[1] for path in map(Path, installed_sources()) if len(path.parts) > 2}
    assert folders <= set(ARROWS)


@pytest.mark.parametrize(
    ("module", "code", "count"),
    [
        ("megatron_adacc.planner.solve", "import torch", 1),
        ("megatron_adacc.planner.solve", "def f():\n    from torch import nn", 1),
        ("megatron_adacc.planner.solve", "from ..graph import trace", 1),
        ("megatron_adacc.planner.solve", "from . import frontier\nfrom ortools import math_opt", 0),
        ("megatron_adacc.graph.trace", "import torch\nfrom megatron_adacc.errors import UserError", 0),
        ("megatron_adacc.graph.trace", "from megatron.core import mpu", 1),
        ("megatron_adacc.graph.trace", "from megatron_adacc.megatron import flags", 1),
        ("megatron_adacc.runtime.stash", "import megatron_adacc.graph.trace, megatron_adacc.planner.plan", 0),
        ("megatron_adacc.runtime.stash", "from megatron_adacc import adaptive", 1),
        ("megatron_adacc.cli", "import torch", 1),
        ("megatron_adacc.megatron.flags", "from megatron_adacc import graph, patches\nimport megatron.core", 0),
    ],
)
def test_a_forbidden_import_is_found(module, code, count, tmp_path):
    path = tmp_path / (module.rpartition(".")[2] + ".py")
    path.write_text(code)
    assert len(violations(path, module)) == count
