# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ranks of an external launcher, each with an engine of its own, decide alike."""

from types import SimpleNamespace

import pytest

from vllm.v1.core import memory_check
from vllm.v1.core.memory_check import RankMemory

GiB = 1 << 30


def test_ranks_with_different_numbers_of_blocks_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = [[RankMemory(blocks, GiB, [])] for blocks in (256, 85)]
    monkeypatch.setattr(memory_check, "gather_plans", lambda *arguments: ranks)
    cache = SimpleNamespace(num_gpu_blocks_override=256)

    with pytest.raises(ValueError, match="--num-gpu-blocks-override=85 gives all"):
        memory_check._with_other_ranks(SimpleNamespace(cache_config=cache), ranks[0])
