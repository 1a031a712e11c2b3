# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

import importlib.util

import pytest
import torch

from vllm.platforms import cpu

ISAS = ("avx512", "avx512_bf16", "amx_tile")


def build(monkeypatch: pytest.MonkeyPatch, modules: set[str]) -> None:
    names = {f"vllm.{module}" for module in modules}
    monkeypatch.setattr(importlib.util, "find_spec", names.__contains__)
    uncached = cpu._built_x86_kernels.__wrapped__
    monkeypatch.setattr(cpu, "_built_x86_kernels", uncached)


@pytest.mark.parametrize(
    ("built", "supported"),
    [
        ({"_C", "_C_AVX512", "_C_AVX2"}, [True, True, True]),
        ({"_C_AVX512", "_C_AVX2"}, [True, False, False]),
        ({"_C_AVX2"}, [False, False, False]),
        (set(), [True, True, True]),  # a tree without kernels lacks none of them
    ],
)
def test_kernels_that_were_not_built_support_nothing(
    monkeypatch: pytest.MonkeyPatch, built: set[str], supported: list[bool]
) -> None:
    for isa in ISAS:
        monkeypatch.setattr(torch.cpu, f"_is_{isa}_supported", lambda: True)
    build(monkeypatch, built)

    assert [cpu.CpuPlatform.supports_x86_isa(isa) for isa in ISAS] == supported


@pytest.mark.parametrize(
    ("isas", "built", "kernels"),
    [
        ((), {"_C", "_C_AVX512", "_C_AVX2"}, "_C_AVX2"),
        (("avx512",), {"_C", "_C_AVX512", "_C_AVX2"}, "_C_AVX512"),
        (("avx512",), {"_C", "_C_AVX2"}, "_C_AVX2"),
        (ISAS, {"_C_AVX512", "_C_AVX2"}, "_C_AVX512"),
        (ISAS, set(), "_C"),
    ],
)
def test_best_kernels_that_the_host_can_use_are_taken(
    monkeypatch: pytest.MonkeyPatch,
    isas: tuple[str, ...],
    built: set[str],
    kernels: str,
) -> None:
    for isa in ISAS:
        supported = isa in isas
        monkeypatch.setattr(torch.cpu, f"_is_{isa}_supported", lambda s=supported: s)
    build(monkeypatch, built)

    assert cpu.CpuPlatform._x86_kernels() == kernels
    assert cpu.CpuPlatform.supports_x86_isa("avx512") == (kernels != "_C_AVX2")


def test_build_without_kernels_for_the_host_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for isa in ISAS:
        monkeypatch.setattr(torch.cpu, f"_is_{isa}_supported", lambda: False)
    build(monkeypatch, {"_C", "_C_AVX512"})

    with pytest.raises(RuntimeError, match=r"has \['_C', '_C_AVX512'\].*\['_C_AVX2'\]"):
        cpu.CpuPlatform._x86_kernels()
