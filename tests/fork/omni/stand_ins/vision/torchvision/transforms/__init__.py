# SPDX-License-Identifier: Apache-2.0
from enum import Enum

InterpolationMode = Enum(
    "InterpolationMode",
    ["NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS"],
)
