# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The `kv-budget` subcommand: arguments only, the work is imported when it runs."""

import argparse
import dataclasses
import sys
import typing

from vllm.entrypoints.cli.types import CLISubcommand

try:
    from vllm.entrypoints.common.startup import (  # type: ignore[import-not-found]
        VLLM_SUBCMD_PARSER_EPILOG,
    )
except ImportError:  # up to 0.32.0
    from vllm.entrypoints.serve.utils.api_utils import VLLM_SUBCMD_PARSER_EPILOG

if typing.TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
else:
    FlexibleArgumentParser = argparse.ArgumentParser

DESCRIPTION = "Show the KV cache budget that a model and its engine arguments need."


class KVBudgetSubcommand(CLISubcommand):
    """The `kv-budget` subcommand for the vLLM CLI."""

    name = "kv-budget"

    @staticmethod
    def cmd(args: argparse.Namespace) -> None:
        if args.model_tag is not None:
            args.model = args.model_tag
        ignored = [
            option
            for dest, (option, default) in vars(args).get("no_effect", {}).items()
            if getattr(args, dest) != default
        ]
        if ignored and args.deploy is None:
            names = ", ".join(ignored)
            print(
                f"vllm kv-budget: ignored, no effect on the cache: {names}",
                file=sys.stderr,
            )
        if args.deploy is not None:
            from vllm.entrypoints.kv_budget_deploy import main
        elif args.output or args.force or args.measure:
            sys.exit(
                "vllm kv-budget: error: --output, --force and --measure need --deploy"
            )
        else:
            from vllm.entrypoints.kv_budget import main
        sys.exit(main(args))

    def subparser_init(
        self, subparsers: argparse._SubParsersAction
    ) -> FlexibleArgumentParser:
        parser = subparsers.add_parser(
            self.name,
            help=DESCRIPTION,
            description=DESCRIPTION
            + " Starts no engine and loads no weights. Sizes are bytes per rank.",
            usage=f"vllm {self.name} [model_tag] [options]",
        )
        parser.add_argument(
            "--json", action="store_true", help="Print JSON instead of text."
        )
        deploy = parser.add_argument_group(
            "a vllm-omni deploy file",
            "Plans the stages of a file for this machine, and prints it with the "
            "`platforms: cpu:` section that fits. Engine arguments come from the file.",
        )
        deploy.add_argument("--deploy", metavar="FILE", help="The file to read.")
        deploy.add_argument(
            "--output", metavar="FILE", help="Write the file instead of printing it."
        )
        deploy.add_argument(
            "--force", action="store_true", help="Overwrite the file of --output."
        )
        deploy.add_argument(
            "--front-end-cores",
            type=int,
            default=1,
            metavar="N",
            help="How many cores to keep free of stages (default: 1).",
        )
        deploy.add_argument(
            "--measure",
            action="store_true",
            help="Say how to measure the stages that cannot be planned.",
        )
        # As for `bench`: engine arguments are costly to declare, so only for this
        # subcommand. They are those of `vllm serve`, so that its command line can be
        # planned; `serve` imports the function from wherever a release has it.
        first = next((arg for arg in sys.argv[1:] if not arg.startswith("-")), None)
        if first == self.name:
            from vllm.engine.arg_utils import EngineArgs
            from vllm.entrypoints.cli import serve

            own = {action.dest for action in parser._actions}
            parser = serve.make_arg_parser(parser)
            takes = {field.name for field in dataclasses.fields(EngineArgs)}
            takes |= own | {"model_tag", "config"}
            parser.set_defaults(
                no_effect={
                    action.dest: (action.option_strings[0], action.default)
                    for action in parser._actions
                    if action.dest not in takes
                }
            )
        parser.epilog = VLLM_SUBCMD_PARSER_EPILOG.format(subcmd=self.name)
        return parser


def cmd_init() -> list[CLISubcommand]:
    return [KVBudgetSubcommand()]
