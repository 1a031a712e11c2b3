# SPDX-License-Identifier: Apache-2.0
"""A stand-in: no CPU build of torchvision for torch 2.13.0 is on the package index.

transformers imports these names where it is loaded; they prepare images.
"""

__version__ = "0.28.0"
