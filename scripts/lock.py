"""Write requirements.lock from the environment that runs this: what megatron-adacc needs, at its versions.

    .venv/bin/python -m pip install --upgrade -e ".[dev,plots]"     # to move to newer versions first
    .venv/bin/python scripts/lock.py
    bash scripts/test.sh

Only what is reached from pyproject.toml is written, so that a package somebody tried out is not pinned.
"""

import importlib.metadata
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
HEADER = """\
# Every dependency of megatron-adacc with all its extras, direct and transitive, at the version it is
# tested with. scripts/setup.sh gives this file to pip as constraints: a line says which version, not
# that it is installed, so packages that exist for one platform only (nvidia-*) do no harm elsewhere.
# Written by scripts/lock.py, which also says how to move to newer versions; do not edit.
"""


def declared_requirements(root: Path) -> list[Requirement]:
    """All requirements in pyproject.toml under `root`: the dependencies, every extra, the build system."""
    pyproject = tomllib.loads((root / "pyproject.toml").read_text())
    project = pyproject["project"]
    texts = [*project["dependencies"], *pyproject["build-system"]["requires"]]
    for extra in project["optional-dependencies"].values():
        texts.extend(extra)
    return [Requirement(text) for text in texts]


def installed_closure(requirements: list[Requirement]) -> dict[str, str]:
    """Canonical name -> public version of all that `requirements` reach in the running environment.

    Raises `importlib.metadata.PackageNotFoundError` if one of them is not installed.
    """
    versions: dict[str, str] = {}
    visited: set[tuple[str, str]] = set()
    queue = list(requirements)
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in visited:
                continue
            visited.add((name, extra))
            distribution = importlib.metadata.distribution(name)
            versions[name] = Version(distribution.version).public
            for text in distribution.requires or []:
                needed = Requirement(text)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    queue.append(needed)
    return versions


def main() -> None:
    versions = installed_closure(declared_requirements(ROOT))
    lines = [f"{name}=={version}\n" for name, version in sorted(versions.items())]
    path = ROOT / "requirements.lock"
    path.write_text(HEADER + "".join(lines))
    print(f"{path}: {len(lines)} packages")


if __name__ == "__main__":
    main()
