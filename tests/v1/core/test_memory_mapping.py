# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A mapping that the kernel refuses is one line that names the limits."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm.platforms import current_platform
from vllm.utils.memory_limits import MemoryLimit, commit_limit
from vllm.v1.core import memory_check

pytestmark = [
    pytest.mark.cpu_test,
    pytest.mark.skipif(
        not current_platform.is_cpu(), reason="the CPU worker patches torch"
    ),
]

GiB = 1 << 30


def test_refused_mapping_names_what_the_process_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address_space = MemoryLimit("RLIMIT_AS", 8 * GiB, GiB)
    monkeypatch.setattr(memory_check, "process_limits", lambda: [address_space])
    monkeypatch.setattr(memory_check, "commit_limit", lambda: None)

    line = memory_check.refused_mapping(MemoryError(), 2 * GiB)

    assert line is not None
    assert "2.0 GiB (2147483648 bytes)" in line
    assert "RLIMIT_AS leaves 1.0 GiB of 8.0 GiB" in line
    another = RuntimeError("another error")
    assert memory_check.refused_mapping(another, 2 * GiB) is None


@pytest.mark.parametrize(("mode", "counts"), [(0, False), (1, False), (2, True)])
def test_commit_limit_counts_where_it_is_kept(
    tmp_path: Path, mode: int, counts: bool
) -> None:
    (tmp_path / "proc/sys/vm").mkdir(parents=True)
    (tmp_path / "proc/sys/vm/overcommit_memory").write_text(f"{mode}\n")
    (tmp_path / "proc/sys/kernel/random").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("one kernel\n")
    (tmp_path / "proc/meminfo").write_text(
        f"CommitLimit: {4 * GiB // 1024} kB\nCommitted_AS: {3 * GiB // 1024} kB\n"
    )

    limit = commit_limit(str(tmp_path))

    assert (limit is not None) == counts
    if limit is not None:
        assert (limit.limit, limit.available) == (4 * GiB, GiB)
        assert limit.place == "one kernel commit"


def test_worker_translates_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker import cpu_worker

    def refuse(worker: object, kv_cache_config: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(cpu_worker.Worker, "initialize_from_config", refuse)
    worker = cpu_worker.CPUWorker.__new__(cpu_worker.CPUWorker)
    config = SimpleNamespace(kv_cache_tensors=[SimpleNamespace(size=2 * GiB)])

    with pytest.raises(ValueError, match=r"refuses to map 2\.0 GiB"):
        worker.initialize_from_config(config)
