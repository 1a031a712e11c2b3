# SPDX-License-Identifier: Apache-2.0
"""In the place of torchaudio, of which there is no build for torch 2.13.0+cpu.

vllm-omni's talker imports this name where it is loaded, and calls it to encode audio.
"""

from typing import NoReturn


def melscale_fbanks(*args: object, **kwargs: object) -> NoReturn:
    raise NotImplementedError("there is no torchaudio here")
