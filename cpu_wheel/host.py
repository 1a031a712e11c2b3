# SPDX-License-Identifier: Apache-2.0
"""What no wheel brings: checked before anything is downloaded, all of it at once.

`make` runs this file before its environment exists, with whatever python3 there is,
so it must parse on any Python 3 and import nothing but the standard library.
"""

import ctypes
import importlib.util
import os
import platform
import shutil
import subprocess
import sys

PYTHON = (3, 11)
# What is missing, and the packages that have it on Debian and Fedora and their kin.
BUILD_AND_TEST = {
    "venv": ("the module venv of {python}", "python3-venv", "python3"),
    "Python.h": ("the headers of {python}", "python3-dev", "python3-devel"),
    "git": ("git", "git", "git"),
    "c++": ("a C++ compiler", "g++", "gcc-c++"),
    "libnuma.so.1": ("libnuma.so.1", "libnuma1", "numactl-libs"),
}
# To compile the native modules; numa.h is for the compiler to find.
COMPILE = {
    "Python.h": BUILD_AND_TEST["Python.h"],
    "libnuma.so.1": BUILD_AND_TEST["libnuma.so.1"],
    "g++": ("g++ 12.3 or newer, named by CXX ({compiler})", "g++", "gcc-c++"),
    "numa.h": ("numa.h", "libnuma-dev", "numactl-devel"),
    "cmake": ("cmake", "cmake", "cmake"),
    "ninja": ("ninja", "ninja-build", "ninja-build"),
}
PACKAGING = {
    "patch": ("patch", "patch", "patch"),
    "quilt": ("quilt", "quilt", "quilt"),
    "dpkg-source": ("dpkg-source", "dpkg-dev", "dpkg-dev"),
    "rpmbuild": ("rpmbuild", "rpm", "rpm-build"),
}


def is_there(need):  # type: (str) -> bool
    """Return whether this host has one of the needs above."""
    if need == "venv":
        return importlib.util.find_spec("ensurepip") is not None
    if need == "Python.h":
        import sysconfig

        return os.path.isfile(os.path.join(sysconfig.get_path("include"), need))
    if need == "c++":
        compilers = (os.environ.get("CXX", "").split(" ")[0], "c++", "g++", "clang++")
        return any(shutil.which(name) for name in compilers if name)
    if need == "libnuma.so.1":
        try:
            ctypes.CDLL(need)
        except OSError:
            return False
        return True
    if need == "g++":  # what upstream's CMake demands
        return compiler_version() >= (12, 3)
    if need == "numa.h":
        return bool(preprocess("#include <numa.h>\n1"))
    return shutil.which(need, path=search_path()) is not None


def search_path():  # type: () -> str
    """Return the PATH of a build: first the tools of the environment of this Python."""
    return os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")


def compiler():  # type: () -> list[str]
    """Return the command of the C++ compiler that CMake takes."""
    return os.environ.get("CXX", "").split() or ["c++"]


def preprocess(text):  # type: (str) -> str
    """Return what the compiler's preprocessor makes of C++, "" if it fails."""
    try:
        return subprocess.run(
            [*compiler(), "-x", "c++", "-E", "-P", "-"],
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            universal_newlines=True,  # noqa: UP021, for old Pythons
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def compiler_version():  # type: () -> tuple[int, ...]
    """Return the version of g++, or none of another compiler or of none."""
    numbers = preprocess("__GNUC__ __GNUC_MINOR__ __clang_major__").split()
    if numbers[2:] != ["__clang_major__"]:
        return ()
    return tuple(int(number) for number in numbers[:2])


def family():  # type: () -> int | None
    """Return which of a need's two packages this distribution's installer knows."""
    for place, installer in ((1, "apt-get"), (2, "dnf")):
        if shutil.which(installer):
            return place
    return None


def missing(needs):  # type: (dict[str, tuple[str, str, str]]) -> str
    """Return, in one line, what this host lacks and how to install it, or ""."""
    lacks = [need for need in needs if not is_there(need)]
    version = ".".join(map(str, compiler_version())) or "no g++"
    found = "{} is {}".format(" ".join(compiler()), version)
    names = [
        needs[need][0].format(python=sys.executable, compiler=found) for need in lacks
    ]
    place = family()
    if sys.version_info < PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        names.insert(
            0, f"Python 3.11 or newer (this is {found}; as in make PYTHON=python3.11)"
        )
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        names.insert(0, f"x86-64 Linux (this is {sys.platform} {platform.machine()})")
    if not names:
        return ""
    line = "missing: " + ", ".join(names)
    if lacks and place:
        installer = "apt-get install " if place == 1 else "dnf install "
        line += "; install with: " + installer
        line += " ".join(needs[need][place] for need in lacks)
    elif lacks:
        line += "; Debian's packages are: " + " ".join(needs[n][1] for n in lacks)
    return line


if __name__ == "__main__":
    wanted = PACKAGING if sys.argv[1:] == ["packaging"] else BUILD_AND_TEST
    if missing(wanted):
        sys.exit("cpu_wheel: " + missing(wanted))
