# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The `kv-budget` subcommand: its command line, which is one of `vllm serve`.

It has a main() of its own, as nearly all of its time is importing vLLM: it imports
what these arguments need, and not what the other subcommands do.
"""

import argparse
import contextlib
import dataclasses
import gc
import logging
import os
import sys
import typing
from typing import Any, NoReturn

from vllm.entrypoints.cli.types import CLISubcommand
from vllm.logger import configure_logging_from_args

if typing.TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
else:
    FlexibleArgumentParser = argparse.ArgumentParser

PROG = "vllm kv-budget"
DESCRIPTION = "Show the KV cache budget that a model and its engine arguments need."
EPILOG = """\
All options of `vllm serve` are accepted; --help=all lists them. Those without an effect
on the KV cache are named and ignored.
"""


class NotEngineArgsError(Exception):
    """The arguments are not all engine arguments."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `vllm serve` does not have."""
    parser.add_argument(
        "--json", action="store_true", help="Print JSON instead of text."
    )
    parser.add_argument(
        "--deploy",
        metavar="FILE",
        help="Plan the stages of a vllm-omni deploy file instead; "
        "`--deploy --help` shows its options.",
    )


def make_parser(**kwargs: Any) -> "FlexibleArgumentParser":
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(
        prog=PROG,
        usage=f"{PROG} [model_tag] [options]",
        description=f"{DESCRIPTION} Starts no engine and loads no weights. Sizes are "
        "bytes per rank.",
        epilog=EPILOG,
        **kwargs,
    )
    add_options(parser)
    return parser


def parse_engine_args(arguments: list[str]) -> argparse.Namespace:
    """Parse options of the engine alone; the server's take long to import.

    Raises:
        NotEngineArgsError: If there are others.

    """
    from vllm.engine.arg_utils import EngineArgs

    # An abbreviation may be one of a server option.
    parser = make_parser(allow_abbrev=False, add_help=False)
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--config")
    parser = EngineArgs.add_cli_args(parser)

    def refuse(message: str) -> NoReturn:
        raise NotEngineArgsError(message)

    parser.error = refuse  # type: ignore[method-assign]
    return parser.parse_args(arguments)


def parse_serve_args(arguments: list[str]) -> argparse.Namespace:
    """Parse a command line of `vllm serve`, and say what of it has no effect."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.cli import serve

    parser = make_parser()
    # `serve` imports the function from wherever a release has it.
    parser = serve.make_arg_parser(parser)
    args = parser.parse_args(arguments)
    takes = {field.name for field in dataclasses.fields(EngineArgs)}
    takes |= {"help", "json", "deploy", "model_tag", "config"}
    ignored = [
        action.option_strings[0]
        for action in parser._actions
        if action.dest not in takes and getattr(args, action.dest) != action.default
    ]
    if ignored:
        names = ", ".join(ignored)
        print(f"{PROG}: ignored, no effect on the cache: {names}", file=sys.stderr)
    return args


def plan_deploy(arguments: list[str]) -> int:
    """Plan a deploy file with the package that knows vllm-omni's."""
    try:
        from vllm_kv_budget_deploy.command import main as plan
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "vllm_kv_budget_deploy":
            raise
        # No package index has it: `make wheel` writes it to dist, next to vLLM's wheel.
        install = "pip install --find-links dist 'vllm[kv-budget]', after `make wheel`"
        print(f"{PROG}: error: --deploy is not installed: {install}", file=sys.stderr)
        return 1
    return plan(arguments)


def log_to_standard_error() -> None:
    """Keep standard output for the plan. At level DEBUG, modules log on import."""
    for handler in logging.getLogger("vllm").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)


def run(arguments: list[str]) -> int:
    """Plan for the arguments behind `vllm kv-budget`, and return the exit status."""
    if any(arg.partition("=")[0] == "--deploy" for arg in arguments):
        configure_logging_from_args(argparse.Namespace())
        log_to_standard_error()
        return plan_deploy(arguments)
    if {"-h", "--help"} & set(arguments):
        print(argparse.ArgumentParser.format_help(make_parser()), end="")
        return 0
    try:
        args = parse_engine_args(arguments)
    except NotEngineArgsError:
        args = parse_serve_args(arguments)
    if args.model_tag is not None:
        args.model = args.model_tag
    configure_logging_from_args(args)
    log_to_standard_error()
    from vllm.entrypoints.kv_budget import main as plan

    return plan(args)


def main(arguments: list[str]) -> NoReturn:
    """Run, and end without taking thousands of modules down one by one."""
    gc.disable()  # all that is imported lives until the end
    # Modules compile functions as they are imported, and nothing runs here.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    log_to_standard_error()
    try:
        status: Any = run(arguments)
    except SystemExit as end:  # of the parser
        status = end.code
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):
            stream.flush()
    os._exit(status or 0)


class KVBudgetSubcommand(CLISubcommand):
    """The subcommand, as `vllm --help` lists it."""

    name = "kv-budget"

    def subparser_init(
        self, subparsers: argparse._SubParsersAction
    ) -> FlexibleArgumentParser:
        return subparsers.add_parser(self.name, help=DESCRIPTION)


def cmd_init() -> list[CLISubcommand]:
    return [KVBudgetSubcommand()]
