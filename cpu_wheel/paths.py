# SPDX-License-Identifier: Apache-2.0
"""Where this repository's files are."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATCHES = ROOT / "patches"
BUILD = ROOT / "build"
DIST = ROOT / "dist"
