# SPDX-License-Identifier: Apache-2.0
"""The command line: `python -m cpu_wheel COMMAND`."""

import argparse
import importlib
import signal
import sys

from cpu_wheel.errors import BuildError
from cpu_wheel.settings import Settings

# Each is a module of cpu_wheel/commands/.
COMMANDS = {
    "torch": "install the CPU build of torch that the release needs",
    "source": "write the patched source tree and print where it is",
    "wheel": "build the wheel and print where it is",
    "install": "build the wheel and install it into this environment",
    "verify": "check where each file of a wheel comes from",
    "series": "print the patch files of a release, in order",
    "packager-series": "write the whole series, the overlay as its last patch",
    "recipes": "write the lists, hashes and requirements that packaging/ repeats",
    "worktree": "make a git repository to edit and test, in build/worktree-RELEASE",
    "refresh": "write the commits of that repository back to patches/",
    "add-release": "pin a release in upstream.toml; say which patches do not apply",
    "stock": "unpack the native wheel as published into build/, for comparison",
}
EPILOG = """\
environment variables, read by every command and by setup.py, pip and CMake:
  CPU_WHEEL_RELEASE       the vLLM release, one of upstream.toml's
  CPU_WHEEL_SDIST         its sdist; then it is not downloaded
  CPU_WHEEL_NATIVE_WHEEL  the wheel whose native modules are used; likewise
  CPU_WHEEL_TREE          a tree that is patched already; then no sdist is needed
  CPU_WHEEL_CACHE         the folder of downloads (default: build/downloads)
  VLLM_USE_PRECOMPILED    0: compile the native modules (default: if no wheel has them)
  SOURCE_DATE_EPOCH       the time of the wheel's members (default: the sdist's)

when the native modules are compiled, upstream's build reads these too, among others:
  CC, CXX                         the compiler; on x86 g++ 12.3 or newer
  FETCHCONTENT_SOURCE_DIR_ONEDNN  oneDNN's source tree; then no network is touched
  VLLM_CPU_X86_VARIANTS           some of amx,avx512,avx2 (default: all three)
  VLLM_CPU_BUNDLE_TCMALLOC        1: put the host's tcmalloc into the wheel (default: 0)
  CMAKE_ARGS, MAX_JOBS            more options of CMake; how many jobs at once

exit status: 0 done, 1 an error that is said in one line, 2 wrong usage, 130 interrupted
"""


def run(arguments: list[str]) -> None:
    """Parse the command line and run its command."""
    parser = argparse.ArgumentParser(
        prog="cpu_wheel",
        description="Build a +cpu vLLM wheel from a pinned release and our patches.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, does in COMMANDS.items():
        command = commands.add_parser(name, help=does)
        if arguments[:1] == [name]:
            # Only this one, so that it needs no more than it uses.
            module = f"cpu_wheel.commands.{name.replace('-', '_')}"
            chosen = importlib.import_module(module)
            if hasattr(chosen, "add_arguments"):
                chosen.add_arguments(command)
    parsed = parser.parse_args(arguments)
    chosen.run(parsed, Settings.from_environment())


def main(arguments: list[str] | None = None) -> int:
    """Run a command; every failure is one line on standard error."""
    # So that a terminated build removes what is half-made, as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        run(sys.argv[1:] if arguments is None else arguments)
    except ModuleNotFoundError as error:
        print(
            f"cpu_wheel: {error.name} is not installed for {sys.executable}: run "
            "`pip install --group build`, or `make` for an environment of its own",
            file=sys.stderr,
        )
        return 1
    except BuildError as error:
        print(f"cpu_wheel: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        what = f": {error.filename}" if error.filename else ""
        print(
            f"cpu_wheel: {error.strerror or error}{what}; nothing half-made was left, "
            "run it again once that is mended",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("cpu_wheel: interrupted; run it again to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
