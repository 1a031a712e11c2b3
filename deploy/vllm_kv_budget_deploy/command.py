# SPDX-License-Identifier: Apache-2.0
"""`vllm kv-budget --deploy`: the command line, and what it prints."""

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import transformers

from vllm import envs
from vllm.entrypoints.kv_budget import PROG, one_line, quiet
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm_kv_budget_deploy.cores import BIND, Machine, read_machine
from vllm_kv_budget_deploy.document import load_document, write_file, write_section
from vllm_kv_budget_deploy.plan import DeployPlan, StagePlan, bind, plan_deploy
from vllm_kv_budget_deploy.stages import read_stages

MEASURE_BY_HAND = """\
Stage {stage_id} ({name}): {why}. To measure what it needs:
  1. Serve with a budget that is surely enough, and send the heaviest load that is to
     be served: max_num_seqs={max_num_seqs} requests of max_model_len={max_model_len}.
  2. Meanwhile watch, of this stage in /metrics, the greatest vllm:kv_cache_usage_perc
     (1 is all), and vllm:num_preemptions_total, which must stay where it is.
     vllm:cache_config_info has num_gpu_blocks and kv_cache_memory_bytes; their ratio
     is the size of a block.
  3. kv_cache_memory_bytes: (usage x num_gpu_blocks, rounded up, + 1 null block) x the
     size of a block. Its RssAnon in /proc/PID/status falls by the difference.\
"""


def as_json(deploy: DeployPlan, machine: Machine) -> str:
    """Return a plan as JSON. Sizes are bytes, budgets per rank."""
    return json.dumps(
        {
            "stages": [
                {
                    "stage_id": plan.stage.stage_id,
                    "model_stage": plan.stage.name,
                    "num_ranks": plan.stage.num_ranks,
                    "kv_cache_memory_bytes": plan.num_bytes,
                    "measure": plan.plan is None,
                    "reason": plan.reason,
                    "budget": asdict(plan.plan.budget)
                    if plan.plan and plan.plan.budget
                    else None,
                    BIND: bind(plan),
                    "memory_nodes": plan.nodes,
                }
                for plan in deploy.stages
            ],
            "front_end": deploy.front_end,
            "kv_cache_bytes": sum(
                plan.num_bytes * plan.stage.num_ranks for plan in deploy.stages
            ),
            "machine": machine._asdict(),
            "shortages": deploy.shortages,
        },
        indent=2,
    )


def measure_by_hand(plan: StagePlan) -> str:
    """Return how to find out what a stage needs that cannot be planned."""
    return MEASURE_BY_HAND.format(
        stage_id=plan.stage.stage_id,
        name=plan.stage.name,
        why=plan.stage.why_measure,
        max_num_seqs=plan.stage.engine_args.get("max_num_seqs"),
        max_model_len=plan.stage.engine_args.get("max_model_len"),
    )


class Parser(FlexibleArgumentParser):
    """vLLM's parser, with help in full and errors in one line."""

    format_help = argparse.ArgumentParser.format_help

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            first = unknown.partition(" ")[0]
            message = f"{first}: with --deploy, engine arguments come from the file"
        print(f"{PROG}: error: {message}", file=sys.stderr)
        sys.exit(1)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(
        prog=PROG,
        usage=f"{PROG} MODEL --deploy FILE [options]",
        description="Plan the stages of a vllm-omni deploy file for this machine, and "
        "print it with the `platforms: cpu:` section that fits.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="The model that the file is for."
    )
    parser.add_argument("--deploy", metavar="FILE", type=Path, help="The file to read.")
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="Write the file instead of printing it.",
    )
    parser.add_argument(
        "--force", action="store_true", help="Overwrite the file of --output."
    )
    parser.add_argument(
        "--front-end-cores",
        type=int,
        default=1,
        metavar="N",
        help="How many cores to keep free of stages.",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="Say how to measure the stages that cannot be planned.",
    )
    parser.add_argument("--json", action="store_true", help="Print the plan as JSON.")
    args: argparse.Namespace = parser.parse_args(list(arguments))
    if args.front_end_cores < 0:
        parser.error(f"--front-end-cores {args.front_end_cores}: expected 0 or more")
    if args.output and (args.output.is_dir() or not args.output.parent.is_dir()):
        parser.error(f"--output {args.output}: expected a file in an existing folder")
    if args.output and args.output.exists() and not args.force:
        parser.error(f"{args.output} exists; --force overwrites it")
    return args


def run(args: argparse.Namespace) -> int:
    """Plan for parsed arguments, print or write the plan, return the exit status."""
    transformers.logging.set_verbosity_error()
    with quiet(), warnings.catch_warnings(action="ignore"):
        yaml, document = load_document(args.deploy)
        machine = read_machine()
        deploy = plan_deploy(
            read_stages(args.deploy, args.model), machine, args.front_end_cores
        )
    if args.json:
        print(as_json(deploy, machine))
    for shortage in deploy.shortages:
        print(f"{PROG}: error: {shortage}", file=sys.stderr)
    if args.measure:
        by_hand = [measure_by_hand(p) for p in deploy.stages if p.plan is None]
        print("\n".join(by_hand) or "Every stage is planned.", file=sys.stderr)
    if deploy.shortages:
        return 1
    write_section(document, deploy)
    if args.output:
        write_file(yaml, document, args.deploy, args.output)
    elif not args.json:
        yaml.dump(document, sys.stdout)
    return 0


def main(arguments: Sequence[str]) -> int:
    """Run, with an error in one line."""
    args = parse(arguments)
    try:
        return run(args)
    except Exception as error:
        if envs.VLLM_LOGGING_LEVEL == "DEBUG":
            raise
        print(f"{PROG}: error: {one_line(error)}", file=sys.stderr)
        return 1
