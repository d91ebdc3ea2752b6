"""A copy of the tree in which scripts/setup.sh meets pretended Pythons only."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

# Does what setup.sh asks of a Python: says its version, makes a venv whose python is itself, and writes
# down what it is told to install.
FAKE_PYTHON = """#!/usr/bin/env bash
case "$1 $2" in
    "-c "*version_info*) echo {version} ;;
    "-c "*ensurepip*) exit {venv_exit} ;;
    "-c "*_base_executable*) readlink -f "$0" ;;
    "-c "*) exit 0 ;;
    "-m venv")
        echo "venv" >>"$FAKE_LOG"
        rm -rf "$4"
        mkdir -p "$4/bin"
        echo "command = $0 -m venv --clear $4" >"$4/pyvenv.cfg"
        ln -s "$0" "$4/bin/python"
        touch "$4/bin/activate"
        ;;
    "-m pip")
        [[ $3 == --version ]] && exit 0
        shift 2
        echo "pip $* PYTHONPATH=${{PYTHONPATH-unset}}" >>"$FAKE_LOG"
        echo "WARNING: Location '/somewhere' is ignored: it is neither a file nor a folder." >&2
        echo "reason of pip" >&2
        sleep "${{FAKE_PIP_SLEEP:-0}}"
        exit "${{FAKE_PIP_EXIT:-0}}"
        ;;
    *) exit 99 ;;
esac
"""
BROKEN_SHIM = "#!/usr/bin/env bash\necho 'pyenv: command not found' >&2\nexit 127\n"
TOOLS = "bash cat cut dirname env flock grep head ln mkdir mv readlink rm sha256sum sleep sort touch"


def write_executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@dataclass(frozen=True)
class Tree:
    """A copy of what setup.sh needs, and the only folders that are on PATH."""

    root: Path
    bin: Path
    log: Path

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    @property
    def stamp(self) -> Path:
        return self.venv / "adacc-setup.stamp"

    def environment(self, **changes: str) -> dict[str, str]:
        tools = self.bin.parent / "tools"
        fixed = {"PATH": f"{self.bin}:{tools}", "HOME": str(self.bin.parent), "FAKE_LOG": str(self.log)}
        return fixed | changes

    def python(self, name: str, version: str, *, venv: bool = True, folder: Path | None = None) -> Path:
        """Put a pretended Python on PATH, or into `folder`."""
        text = FAKE_PYTHON.format(version=version, venv_exit=0 if venv else 1)
        return write_executable((folder or self.bin) / name, text)

    def broken_shim(self, name: str) -> Path:
        """Put a command on PATH that fails as pyenv's shims do for a version that is not chosen."""
        return write_executable(self.bin / name, BROKEN_SHIM)

    def start(self, *arguments: str, **changes: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(self.root / "scripts" / "setup.sh"), *arguments],
            cwd="/",
            env=self.environment(**changes),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def setup(self, *arguments: str, **changes: str) -> tuple[int, str, str]:
        """Run setup.sh from another folder: (exit code, stdout, stderr)."""
        process = self.start(*arguments, **changes)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def calls(self) -> list[str]:
        """What the pretended Pythons were told since the last time."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines

    def pip_calls(self, *extra: str, constraints: Path | None = None) -> list[str]:
        """The two calls of pip that a complete set-up makes."""
        start = f"pip install --log {self.venv / 'adacc-setup.log'} -c {constraints or self.root / 'requirements.lock'}"
        options = "".join(f" {argument}" for argument in extra)
        return [
            f"{start}{options} setuptools PYTHONPATH=unset",
            f"{start}{options} --no-build-isolation -e {self.root}[dev,plots] PYTHONPATH=unset",
        ]


@pytest.fixture
def tree(tmp_path) -> Tree:
    root = tmp_path / "a checkout"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup.sh", root / "scripts")
    for name in ("pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, root)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in TOOLS.split():
        found = shutil.which(name)
        assert found is not None, name
        (tools / name).symlink_to(found)
    (tmp_path / "bin").mkdir()
    return Tree(root, tmp_path / "bin", tmp_path / "log")
