# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Page cache of a control group counts as available, as the kernel gives it back."""

from pathlib import Path

import pytest

from vllm.utils.memory_limits import cgroup_limits

MiB = 1 << 20
GiB = 1 << 30
LIMIT, USAGE = 4 * GiB, 3 * GiB
V2 = ("0::/", "cgroup2", "memory.max", "memory.current")
V1 = ("4:memory:/", "cgroup", "memory.limit_in_bytes", "memory.usage_in_bytes")


def _available(root: Path, version: tuple[str, ...], **stat: int) -> int:
    """What is left below a limit of 4 GiB of which 3 GiB are in use."""
    process, fstype, limit_file, usage_file = version
    group = root / "group"
    group.mkdir(exist_ok=True)
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(f"{process}\n")
    (root / "proc/self/mountinfo").write_text(
        f"30 23 0:28 / /group rw - {fstype} cgroup rw,memory\n"
    )
    (group / limit_file).write_text(f"{LIMIT}\n")
    (group / usage_file).write_text(f"{USAGE}\n")
    lines = [f"{name} {size}\n" for name, size in stat.items()]
    (group / "memory.stat").write_text("".join(lines))
    (limit,) = cgroup_limits(str(root))
    return limit.available


@pytest.mark.parametrize(
    ("version", "names"),
    [
        pytest.param(
            V2,
            (
                *("active_file", "inactive_file"),
                *("file_mapped", "file_dirty", "file_writeback"),
            ),
            id="v2",
        ),
        # Without "total_" they are those of the group alone, not of those below it.
        pytest.param(
            V1,
            (
                *("total_active_file", "total_inactive_file"),
                *("total_mapped_file", "total_dirty", "total_writeback"),
            ),
            id="v1",
        ),
    ],
)
def test_page_cache_is_available_unless_mapped_or_dirty(
    tmp_path: Path, version: tuple[str, ...], names: tuple[str, ...]
) -> None:
    sizes = (512 * MiB, 2 * GiB, 100 * MiB, 10 * MiB, MiB)

    without = _available(tmp_path, version)
    found = _available(tmp_path, version, **dict(zip(names, sizes, strict=True)))

    reclaimable = 512 * MiB + 2 * GiB - (100 + 10 + 1) * MiB
    # Of what is left a part may be kept back.
    assert 0.99 * reclaimable < found - without <= reclaimable


def test_shared_memory_is_not_page_cache(tmp_path: Path) -> None:
    """What lies in /dev/shm is mapped by nobody for a while, and cannot be dropped."""
    without = _available(tmp_path, V2)

    assert _available(tmp_path, V2, shmem=USAGE, inactive_anon=USAGE) == without
