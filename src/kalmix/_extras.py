"""Errors that name the extra of kalmix which installs a missing package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec

_REQUIREMENT = re.compile(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]")
_FOR_DEVELOPERS = ("dev", "docs")
_DEPENDENCIES = {"huggingface-hub": "transformers"}  # packages that kalmix imports and another package installs


@cache
def packages_of_extras() -> dict[str, tuple[str, ...]]:
    """Return the packages of each extra, smallest extra first, from the metadata of the installed kalmix.

    The result is empty where kalmix is imported from a folder without being installed.
    """
    try:
        found = [_REQUIREMENT.match(line) for line in requires("kalmix") or ()]
    except PackageNotFoundError:
        return {}
    packages: dict[str, tuple[str, ...]] = {}
    for match in found:
        if match and match[2] not in _FOR_DEVELOPERS:
            packages[match[2]] = (*packages.get(match[2], ()), match[1].lower())
    return dict(sorted(packages.items(), key=lambda item: len(item[1])))


def missing_package(name: str | None) -> str | None:
    """Return a message with the install command of a missing package, or `None` if no extra installs it."""
    package = (name or "").partition(".")[0].replace("_", "-").lower()
    package = _DEPENDENCIES.get(package, package)
    for extra, packages in packages_of_extras().items():
        if package in packages:
            return f"{package} is not installed; install it with: pip install 'kalmix[{extra}]'"
    return None


@contextmanager
def optional_imports() -> Iterator[None]:
    """Make a failed import in this block name the extra to install.

    Raises:
        ModuleNotFoundError: a package is missing; the message holds its install command.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        message = missing_package(error.name)
        if message is None:
            raise
        raise ModuleNotFoundError(message, name=error.name) from error


def require_extra(user: str, extra: str) -> None:
    """Check that all packages of an extra are installed, without importing them.

    Args:
        user: subject of the message, such as "`kalmix train`".
        extra: name of the extra, such as "train".

    Raises:
        ModuleNotFoundError: packages are missing; the message names them and the install command.
    """
    packages = packages_of_extras().get(extra, ())
    names = [name for name in packages if find_spec(name.replace("-", "_")) is None]
    if names:
        absent = f"{', '.join(names)}, which {'is' if len(names) == 1 else 'are'} not installed"
        raise ModuleNotFoundError(f"{user} needs {absent}: pip install 'kalmix[{extra}]'", name=names[0])
