# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

import pytest
import torch

from vllm.platforms import cpu

ISAS = ("avx512", "avx512_bf16", "amx_tile")


@pytest.mark.parametrize(
    ("built", "supported"),
    [
        ({"_C", "_C_AVX512", "_C_AVX2"}, [True, True, True]),
        ({"_C_AVX512", "_C_AVX2"}, [True, False, False]),
        ({"_C_AVX2"}, [False, False, False]),
    ],
)
def test_kernels_that_were_not_built_support_nothing(
    monkeypatch: pytest.MonkeyPatch, built: set[str], supported: list[bool]
) -> None:
    for isa in ISAS:
        monkeypatch.setattr(torch.cpu, f"_is_{isa}_supported", lambda: True)
    monkeypatch.setattr(cpu, "_is_built", built.__contains__)

    assert [cpu.CpuPlatform.supports_x86_isa(isa) for isa in ISAS] == supported


def test_host_without_avx512_uses_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    for isa in ISAS:
        monkeypatch.setattr(torch.cpu, f"_is_{isa}_supported", lambda: False)
    monkeypatch.setattr(cpu, "_is_built", lambda module: True)

    assert cpu.CpuPlatform._x86_kernels() == "_C_AVX2"
    assert not any(map(cpu.CpuPlatform.supports_x86_isa, ISAS))
