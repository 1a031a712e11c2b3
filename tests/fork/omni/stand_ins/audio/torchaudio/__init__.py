# SPDX-License-Identifier: Apache-2.0
"""A stand-in: no build of torchaudio matches torch 2.13.0+cpu."""
