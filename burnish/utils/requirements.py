"""Which packages burnish wants, in which versions, and which of them are installed; nothing of them is imported."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.markers import UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name


@dataclass(frozen=True, slots=True)
class Wanted:
    """One package."""

    name: str
    versions: str
    """The range, as ``>=5.16,<5.25``; empty: any."""
    extra: str | None = None
    """Of burnish, which brings it; None: burnish does not run without it."""

    def fits(self, version: str) -> bool:
        """Whether ``version`` is in the range. What comes behind the number of a build (``+cpu``) does not count."""
        return Requirement(f"{self.name}{self.versions}").specifier.contains(
            version.partition("+")[0], prereleases=True
        )


@dataclass(frozen=True, slots=True)
class Project:
    """What burnish says of itself."""

    version: str
    python: str
    """The range of Python's versions."""
    wanted: tuple[Wanted, ...]


def read_project() -> Project:
    """burnish as it is here: by its source tree's ``pyproject.toml``, or else as it was installed."""
    source = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if source.is_file():
        project = tomllib.loads(source.read_text())["project"]
        wanted = _wanted(project["dependencies"], None)
        for extra, requirements in project["optional-dependencies"].items():
            wanted += _wanted(requirements, extra)
        return Project(project["version"], project["requires-python"], tuple(wanted))
    about = metadata.metadata("burnish")
    wanted = []
    for line in metadata.requires("burnish") or []:
        requirement = Requirement(line)
        extras = [extra for extra in about.get_all("Provides-Extra") or [] if _is_of(requirement, extra)]
        if requirement.marker is None or "extra" not in str(requirement.marker):
            wanted += _wanted([line], None)
        for extra in extras:
            wanted += _wanted([line], extra)
    return Project(about["Version"], about["Requires-Python"], tuple(wanted))


def installed_version(name: str) -> str | None:
    """Of the package, None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def unmet_needs(name: str, of: tuple[str, ...]) -> list[tuple[Wanted, str]]:
    """What an installed package itself wants of some others that are installed too and do not fit: with their versions.

    Args:
        of: names of those others.
    """
    unmet = []
    for line in metadata.requires(name) or []:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:  # Old packages write what they like.
            continue
        version = installed_version(requirement.name)
        if canonicalize_name(requirement.name) not in of or version is None or not _applies(requirement):
            continue
        wanted = Wanted(requirement.name, _without_build(str(requirement.specifier)))
        if not wanted.fits(version):
            unmet.append((wanted, version))
    return unmet


def _wanted(requirements: list[str], extra: str | None) -> list[Wanted]:
    found = []
    for line in requirements:
        requirement = Requirement(line)
        if canonicalize_name(requirement.name) != "burnish":  # An extra that is made of others.
            found.append(Wanted(requirement.name, _sorted(requirement.specifier), extra))
    return found


def _sorted(specifier: Any) -> str:
    """The lower bound first, as it is read."""
    return ",".join(sorted(map(str, specifier), key=lambda part: (not part.startswith((">", "=", "~")), part)))


def _without_build(versions: str) -> str:
    return ",".join(part.partition("+")[0] for part in versions.split(","))


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _is_of(requirement: Requirement, extra: str) -> bool:
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        return False
    try:
        return requirement.marker.evaluate({"extra": extra})
    except UndefinedEnvironmentName:
        return False
