# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Page cache of a control group counts as available, as the kernel gives it back."""

from pathlib import Path

import pytest

from vllm.utils.memory_limits import cgroup_limits

MiB = 1 << 20
GiB = 1 << 30
V2 = ("0::/", "cgroup2", "memory.max", "memory.current")
V1 = ("4:memory:/", "cgroup", "memory.limit_in_bytes", "memory.usage_in_bytes")
V2_STAT = "active_file inactive_file file_mapped file_dirty file_writeback"
# Without "total_" they are those of the group alone, not of those below it.
V1_STAT = (
    "total_active_file total_inactive_file total_mapped_file total_dirty "
    "total_writeback"
)


def _available(root: Path, version: tuple[str, ...], stat: dict[str, int]) -> int:
    """What is left below a limit of 4 GiB of which 3 GiB are in use."""
    process, fstype, limit_file, usage_file = version
    for path, text in (
        ("proc/self/cgroup", process),
        ("proc/self/mountinfo", f"30 23 0:28 / /group rw - {fstype} cgroup rw,memory"),
        (f"group/{limit_file}", str(4 * GiB)),
        (f"group/{usage_file}", str(3 * GiB)),
        ("group/memory.stat", "\n".join(f"{name} {stat[name]}" for name in stat)),
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{text}\n")
    (limit,) = cgroup_limits(str(root))
    return limit.available


@pytest.mark.parametrize(
    ("version", "names"), [(V2, V2_STAT), (V1, V1_STAT)], ids=["v2", "v1"]
)
def test_page_cache_is_available_unless_mapped_or_dirty(
    tmp_path: Path, version: tuple[str, ...], names: str
) -> None:
    sizes = (512 * MiB, 2 * GiB, 100 * MiB, 10 * MiB, MiB)

    without = _available(tmp_path, version, {})
    found = _available(tmp_path, version, dict(zip(names.split(), sizes, strict=True)))

    reclaimable = 512 * MiB + 2 * GiB - (100 + 10 + 1) * MiB
    # Of what is left a part may be kept back.
    assert 0.99 * reclaimable < found - without <= reclaimable


def test_shared_memory_is_not_page_cache(tmp_path: Path) -> None:
    """What lies in /dev/shm is mapped by nobody for a while, and cannot be dropped."""
    without = _available(tmp_path, V2, {})

    assert _available(tmp_path, V2, {"shmem": 3 * GiB, "anon": 3 * GiB}) == without
