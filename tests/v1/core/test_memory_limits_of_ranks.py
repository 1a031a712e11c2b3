# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which limits ranks share, and what is kept back of them."""

import resource
from pathlib import Path

import pytest

from vllm.utils.memory_limits import limits_of_node, process_limits

pytestmark = pytest.mark.cpu_test

GiB = 1 << 30


def _group(root: Path, point: str = "/group", boot_id: str = "one kernel") -> str:
    """A container's view: its group is the root of the hierarchy."""
    for path, text in (
        ("proc/self/cgroup", "0::/"),
        ("proc/self/mountinfo", f"30 23 0:28 / {point} rw - cgroup2 cgroup rw"),
        ("proc/sys/kernel/random/boot_id", boot_id),
        (f"{point}/memory.max", str(2 * GiB)),
        (f"{point}/memory.current", "0"),
    ):
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return str(root)


def test_processes_of_a_group_share_its_place(tmp_path: Path) -> None:
    """Containers have the same path, a group of its own, and one host."""
    first = limits_of_node(0, _group(tmp_path))
    again = limits_of_node(0, _group(tmp_path))
    second = limits_of_node(0, _group(tmp_path, point="/other"))
    elsewhere = limits_of_node(0, _group(tmp_path, boot_id="another kernel"))

    places = [
        [limit.place for limit in limits]
        for limits in (first, again, second, elsewhere)
    ]
    (host, group), same, (other_host, other_group), (far_host, far_group) = places
    assert same == [host, group]
    assert other_host == host and other_group != group
    assert far_host != host and far_group != group


def test_hosts_share_no_place(tmp_path: Path) -> None:
    """Each has a memory node 0, and a group at the same path."""

    def places(boot_id: str) -> set[str | None]:
        root = _group(tmp_path, boot_id=boot_id)
        node = tmp_path / "sys/devices/system/node/node0/meminfo"
        node.parent.mkdir(parents=True, exist_ok=True)
        node.write_text(f"Node 0 MemTotal: {64 * GiB // 1024} kB\n")
        return {limit.place for limit in limits_of_node(0, root)}

    first = places("one kernel")
    assert len(first) == 3 and None not in first
    assert places("one kernel") == first
    assert not places("another kernel") & first


def test_what_is_charged_late_and_page_tables_are_kept_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)

    _, group = limits_of_node(0, _group(tmp_path))

    left = 2 * GiB - 64 * 128 * resource.getpagesize()
    assert group.available == left - left // 512


@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_limit_of_the_process(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    number = getattr(resource, kind)
    monkeypatch.setattr(
        resource,
        "getrlimit",
        lambda asked: (64 * GiB if asked == number else resource.RLIM_INFINITY, 0),
    )

    (limit,) = process_limits()

    assert limit.name.startswith(kind)
    assert limit.limit == 64 * GiB
    assert 0 < limit.available < 64 * GiB
    assert limit.place is None
