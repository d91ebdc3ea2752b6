"""The Dockerfile, which no test can build: its pins are the lock's, what it copies is there, what it runs is a shell's.

`findings` looks for mistakes; each kind is also put into a copy of the file, to see it found.
"""

import fnmatch
import re
import shlex
import subprocess
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "Dockerfile").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TARGETS = {"gpu", "cpu"}
# The base image decides these, not the lock.
NOT_PACKAGES = {"CUDA_VERSION", "PYTHON_VERSION"}
KNOWN = {"ARG", "CMD", "COPY", "ENV", "FROM", "HEALTHCHECK", "RUN", "USER", "WORKDIR"}


@dataclass
class Stage:
    """One FROM with what follows it: (instruction, its text), continued lines joined and comments left out."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [text for name, text in self.steps if name == instruction]


def instructions(text: str) -> list[tuple[str, str]]:
    """Every instruction, in order."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split()[0].upper(), line.split(None, 1)[1]) for line in joined.splitlines() if line.strip()]


def arguments(steps: list[tuple[str, str]]) -> dict[str, str]:
    """The defaults of ARG."""
    found = (text.split("=", 1) for name, text in steps if name == "ARG" and "=" in text)
    return {name: value.strip('"') for name, value in found}


def stages(text: str) -> dict[str, Stage]:
    """By name, versions in the names of base images filled in."""
    found: dict[str, Stage] = {}
    steps = instructions(text)
    outside = arguments(steps[: next(i for i, (name, _) in enumerate(steps) if name == "FROM")])
    current: Stage | None = None
    for name, value in steps:
        if name == "FROM":
            base, _, stage = value.split()
            base = re.sub(r"\$\{(\w+)\}", lambda match: outside[match[1]], base)
            current = found[stage] = Stage(stage, base)
        elif current is not None:
            current.steps.append((name, value))
    return found


def lineage(found: dict[str, Stage], name: str) -> list[Stage]:
    """A stage and those that it is built on, the last one first."""
    line = []
    while name in found:
        line.append(found[name])
        name = found[name].base
    return line


def locked() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps the path out of the build; the last line that matches decides."""
    result = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#") and fnmatch.fnmatch(path, line.lstrip("!").removeprefix("**/")):
            result = not line.startswith("!")
    return result


def findings(text: str) -> list[str]:
    """What is wrong with a Dockerfile, one sentence each."""
    found, steps = stages(text), instructions(text)
    wrong = [f"unknown instruction {name}" for name, _ in steps if name not in KNOWN]
    wrong += [f"no target {name}" for name in TARGETS - found.keys()]
    wrong += _pins(steps) + _copies(found) + _shell(steps)
    for stage in found.values():
        if stage.base not in found and stage.base != "scratch" and not re.search(r":\d", stage.base):
            wrong.append(f"{stage.base} has no version")
    for name in TARGETS & found.keys():
        wrong += _target(lineage(found, name))
    return wrong


def _pins(steps: list[tuple[str, str]]) -> list[str]:
    lock, wrong, pins = locked(), [], []
    for name, text in steps:
        declared = re.fullmatch(r"(\w+)_VERSION=(\S+)", text)
        if name == "ARG" and declared and f"{declared[1]}_VERSION" not in NOT_PACKAGES:
            pins.append((declared[1].lower().replace("_", "-"), declared[2], text))
        pins += [(one[1].lower(), one[2], one[0]) for one in re.finditer(r"([\w-]+)==(\d[\w.]*)", text)]
    for package, version, written in pins:
        if lock.get(package) != version:
            wrong.append(f"{written}, but the lock has {package} {lock.get(package)}")
    wrong += [f"{name} is not pinned" for name in {"torch", "triton", "megatron-core"} - {pin[0] for pin in pins}]
    given = arguments(steps)
    if given.get("PYTHON_VERSION") not in SpecifierSet(PYPROJECT["project"]["requires-python"]):
        wrong.append("the Python is not one that the project takes")
    if not re.fullmatch(r"[0-9a-f]{40}", given.get("APEX_COMMIT", "")):
        wrong.append("apex is not pinned to a commit")
    return wrong


def _copies(found: dict[str, Stage]) -> list[str]:
    wrong, copied = [], set()
    for stage in found.values():
        for text in stage.all("COPY") + stage.all("ADD"):
            words = shlex.split(text)
            source = next((word.partition("=")[2] for word in words if word.startswith("--from=")), None)
            if source is not None and source not in found:
                wrong.append(f"COPY from {source}, which is no stage")
            if source is None:
                copied |= set(words[:-1])
    wrong += [f"{path} is copied and is not there" for path in copied if not (ROOT / path).exists()]
    wrong += [f"{path} is copied and in .dockerignore" for path in copied if ignored(path)]
    folders = {PYPROJECT["tool"]["setuptools"]["package-dir"].get(name, name).split(".")[0]
               for name in PYPROJECT["tool"]["setuptools"]["packages"]}  # fmt: skip
    needed = folders | {
        "pyproject.toml",
        "requirements.lock",
        "pretrain_gpt.py",
        "scripts",
        PYPROJECT["project"]["readme"],
    }
    return wrong + [f"{path} is needed and not copied" for path in sorted(needed - copied)]


def _shell(steps: list[tuple[str, str]]) -> list[str]:
    wrong = []
    for name, text in steps:
        if name != "RUN":
            continue
        script = re.sub(r"^(--\w+=\S+\s+)+", "", text)
        checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        if checked.returncode:
            wrong.append(f"RUN is no shell: {checked.stderr.strip()}")
        if "apt-get install" in script and not (
            "--no-install-recommends" in script
            and "rm -rf /var/lib/apt/lists/*" in script
            and "apt-get update" in script
        ):
            wrong.append("apt-get leaves its lists, or installs what it recommends")
        wrong += [
            f"{path} is run and is not there"
            for path in re.findall(r"bash (\S+\.sh)", script)
            if not (ROOT / path).exists()
        ]
    return wrong


def _target(line: list[Stage]) -> list[str]:
    name, steps = line[0].name, [step for stage in reversed(line) for step in stage.steps]
    wrong = []
    user = [text for instruction, text in steps if instruction == "USER"]
    if not user or user[-1].split(":")[0] in ("root", "0"):
        wrong.append(f"{name} runs as root")
    elif not any(re.search(rf"useradd .*\b{user[-1]}\b", text) for instruction, text in steps if instruction == "RUN"):
        wrong.append(f"{name} does not make its user")
    health = [text for instruction, text in steps if instruction == "HEALTHCHECK"]
    if not health or not health[-1].endswith('CMD ["adacc", "doctor"]'):
        wrong.append(f"{name} does not ask adacc doctor about its health")
    if not any(instruction == "ENV" and re.match(r"PATH=\S*/\.venv/bin:", text) for instruction, text in steps):
        wrong.append(f"{name} does not find adacc")
    return wrong


def test_nothing_is_wrong():
    assert findings(TEXT) == []


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("ARG TORCH_VERSION=2.14.1\nARG TRITON", "ARG TORCH_VERSION=2.14.0\nARG TRITON", "lock has torch 2.14.1"),
        ("TRITON_VERSION=3.8.0", "TRITON_VERSION=3.8.1", "lock has triton 3.8.0"),
        ("MEGATRON_CORE_VERSION=0.19.2", "MEGATRON_CORE_VERSION=0.19.1", "lock has megatron-core 0.19.2"),
        ("bash scripts/setup.sh", "pip install numpy==1.0", "lock has numpy"),
        ("PYTHON_VERSION=3.12", "PYTHON_VERSION=3.11", "not one that the project takes"),
        ("APEX_COMMIT=6424da3b", "APEX_COMMIT=master", "not pinned to a commit"),
        ("AS cpu", "AS tiny", "no target cpu"),
        ("USER adacc", "USER root", "runs as root"),
        ("useradd", "true", "does not make its user"),
        ("HEALTHCHECK --interval=5m", "# HEALTHCHECK", "about its health"),
        ("ENV PATH=", "ENV OTHER_PATH_", "does not find adacc"),
        ("COPY configs", "COPY settings", "settings is copied and is not there"),
        ("COPY configs", "COPY tests", "tests is copied and in .dockerignore"),
        ("COPY kernels /kernels", "# COPY", "kernels is needed and not copied"),
        ("--from=gpu-build", "--from=elsewhere", "elsewhere, which is no stage"),
        ("&& \\\n    rm -rf /var", "; \\\n    true /var", "leaves its lists"),
        ("exit 2; }", "exit 2; ", "is no shell"),
        ("scripts/setup.sh &&", "scripts/install.sh &&", "scripts/install.sh is run and is not there"),
        ("python:${PYTHON_VERSION}-slim-bookworm", "python", "python has no version"),
        ("\nWORKDIR", "\nWORKDIRECTORY", "unknown instruction WORKDIRECTORY"),
    ],
)  # fmt: skip
def test_a_mistake_is_found(old: str, new: str, sentence: str):
    assert old in TEXT
    assert any(sentence in finding for finding in findings(TEXT.replace(old, new)))


def test_the_gpu_image_has_code_for_volta():
    """CUDA 12.6 is the last that PyTorch 2.14 is built for with sm_70, and knows nothing beyond sm_90."""
    found = stages(TEXT)
    assert all("cuda:12.6" in lineage(found, name)[-1].base for name in ("gpu", "gpu-build"))
    (line,) = [text for text in found["gpu-build"].all("ENV") if text.startswith("TORCH_CUDA_ARCH_LIST")]
    listed = [float(one) for one in line.partition("=")[2].strip('"').split(";")]
    assert min(listed) == 7.0
    assert max(listed) == 9.0
    assert any("+cu126" in text for text in found["gpu-build"].all("RUN"))
    assert "apex" not in " ".join(found["cpu"].all("RUN"))


def test_the_commit_of_apex_is_told_why():
    before = TEXT[: TEXT.index("ARG APEX_COMMIT")].splitlines()
    assert before[-1].startswith("#")
