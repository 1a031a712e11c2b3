# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A mapping that the kernel refuses is one line that names the limits."""

from pathlib import Path

import pytest

from vllm.utils.memory_limits import MemoryLimit, commit_limit
from vllm.v1.core import memory_check

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
    (tmp_path / "proc/meminfo").write_text(
        f"CommitLimit: {4 * GiB // 1024} kB\nCommitted_AS: {3 * GiB // 1024} kB\n"
    )

    limit = commit_limit(str(tmp_path))

    assert (limit is not None) == counts
    if limit is not None:
        assert (limit.limit, limit.available) == (4 * GiB, GiB)
