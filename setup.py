# SPDX-License-Identifier: Apache-2.0
"""`VLLM_TARGET_DEVICE=cpu python setup.py bdist_wheel`, as in vLLM's own tree."""

import argparse
import sys

from cpu_wheel.__main__ import main

parser = argparse.ArgumentParser(
    description="Build the +cpu wheel, as `python -m cpu_wheel wheel` does."
)
parser.add_argument("command", choices=["bdist_wheel"])
parser.add_argument("-d", "--dist-dir", default="dist", metavar="DIR")
arguments = parser.parse_args()
sys.exit(main(["wheel", "--dist-dir", arguments.dist_dir]))
