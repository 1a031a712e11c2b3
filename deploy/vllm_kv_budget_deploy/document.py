# SPDX-License-Identifier: Apache-2.0
"""The YAML of a deploy file, whose comments are kept."""

import os
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from vllm.entrypoints.kv_budget import one_line
from vllm_kv_budget_deploy.cores import BIND, format_ids
from vllm_kv_budget_deploy.plan import DeployPlan, bind, reason_of_cores, short


def annotate(mapping: Any, key: str, text: str) -> None:
    """Put a comment at the end of a key's line, and keep what follows that line."""
    tokens = mapping.ca.items.get(key)
    after = tokens[2].value.partition("\n")[2] if tokens and tokens[2] else ""
    mapping.ca.items.pop(key, None)
    mapping.yaml_add_eol_comment(f"{text}\n{after}".rstrip(" "), key)


def child(mapping: Any, key: str) -> Any:
    """Return the mapping under a key, made if there is none, a line for each key."""
    if not mapping.get(key):
        mapping[key] = type(mapping)()
    mapping[key].fa.set_block_style()
    return mapping[key]


def write_section(document: Any, deploy: DeployPlan) -> None:
    """Write a plan into the `platforms: cpu:` section of a deploy document."""
    document.fa.set_block_style()
    platforms = child(document, "platforms")
    cpu = child(platforms, "cpu")
    total = sum(plan.num_bytes * plan.stage.num_ranks for plan in deploy.stages)
    left = f"CPUs {format_ids(deploy.front_end)}" if deploy.front_end else "no CPU"
    annotate(
        platforms,
        "cpu",
        f"KV caches of all ranks: {short(total)}; left to the front end: {left}",
    )
    if cpu.get("stages"):
        cpu["stages"].fa.set_block_style()
    else:
        cpu["stages"] = []
    entries = {entry["stage_id"]: entry for entry in cpu["stages"]}
    for plan in deploy.stages:
        stage_id = plan.stage.stage_id
        if stage_id not in entries:
            entries[stage_id] = type(cpu)(stage_id=stage_id)
            cpu["stages"].append(entries[stage_id])
        entry = entries[stage_id]
        entry.fa.set_block_style()
        # vllm-omni's nested layout, in which it reads no key beside these two.
        nested = "engine_args" in entry
        engine_args = child(entry, "engine_args") if nested else entry
        env = child(child(entry, "runtime") if nested else entry, "env")
        no_value = "kv_cache_memory_bytes" not in plan.stage.engine_args
        if plan.num_bytes == 0 and "kv_cache_memory_bytes" in engine_args:
            text = f"without effect, {plan.reason}"
            annotate(engine_args, "kv_cache_memory_bytes", text)
        elif plan.num_bytes == 0 or (plan.plan is None and no_value):
            annotate(entry, "stage_id", plan.reason)
        else:
            engine_args["kv_cache_memory_bytes"] = plan.num_bytes
            annotate(engine_args, "kv_cache_memory_bytes", plan.reason)
        env[BIND] = DoubleQuotedScalarString(bind(plan))
        annotate(env, BIND, reason_of_cores(plan, deploy))


def load_document(path: Path) -> tuple[Any, Any]:
    """Return a YAML reader that keeps comments, and the document that it read.

    Raises:
        ValueError: If the file is no YAML mapping.

    """
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = sys.maxsize
    yaml.indent(mapping=2, sequence=4, offset=2)
    try:
        document = yaml.load(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except YAMLError as error:
        raise ValueError(f"{path}: invalid YAML: {one_line(error)}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path}: not a deploy file: expected a YAML mapping")
    return yaml, document


def write_file(yaml: Any, document: Any, source: Path, target: Path) -> None:
    """Write a document beside the target, then rename it.

    An inherited file is named relative to the folder of the file that names it.
    """
    base = document.get("base_config")
    if base and "$" not in base and source.parent.resolve() != target.parent.resolve():
        document["base_config"] = os.path.relpath(source.parent / base, target.parent)
    part = target.with_name(f".{target.name}.part")
    yaml.dump(document, part)
    part.replace(target)
