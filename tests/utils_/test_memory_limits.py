# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which memory limits a process finds, in the layouts that people run vLLM in.

Each layout is a folder with the files that a process sees there: /proc/self/cgroup
and mountinfo, and the groups under /sys/fs/cgroup. What /proc/meminfo has is psutil's.
"""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from vllm.utils.memory_limits import cgroup_limits, limits_of_node, node_limit

GiB = 1 << 30
V1_UNLIMITED = 0x7FFFFFFFFFFFF000
V2 = "/sys/fs/cgroup"
V1 = "/sys/fs/cgroup/memory"


class Host:
    """The files of a host, below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mounts: list[str] = []
        self.memory = SimpleNamespace(total=64 * GiB, available=60 * GiB)

    def write(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def process(self, *lines: str) -> None:
        self.write("proc/self/cgroup", "".join(f"{line}\n" for line in lines))

    def mount(self, fstype: str, group: str, point: str, options: str = "rw") -> None:
        number = len(self.mounts)
        self.mounts.append(
            f"{30 + number} 23 0:{28 + number} {group} {point} rw,nosuid shared:4 "
            f"- {fstype} cgroup {options}\n"
        )
        self.write("proc/self/mountinfo", "".join(self.mounts))

    def v2(
        self, folder: str, limit: int | str = "max", usage: int = 0, **stat: int
    ) -> None:
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.high", "max\n")
        self.write(f"{folder}/memory.current", f"{usage}\n")
        lines = [f"{name} {size}\n" for name, size in stat.items()]
        self.write(f"{folder}/memory.stat", "".join(lines))

    def v1(
        self, folder: str, limit: int = V1_UNLIMITED, usage: int = 0, **stat: int
    ) -> None:
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{usage}\n")
        lines = [f"{name} {size}\n" for name, size in stat.items()]
        self.write(f"{folder}/memory.stat", "".join(lines))

    def limits(self) -> dict[str, int]:
        """The limits by the file that they are in."""
        return {
            limit.name.partition(f"({self.root}")[2].rstrip(")"): limit.limit
            for limit in cgroup_limits(str(self.root))
        }

    def available(self) -> list[int]:
        return [limit.available for limit in cgroup_limits(str(self.root))]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host(tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host.memory)
    return host


def docker_v2(host: Host) -> dict[str, int]:
    """`docker run --memory 2g`: a namespace whose root is the container's group."""
    host.process("0::/")
    host.mount("cgroup2", "/", V2)
    host.v2(V2, 2 * GiB)
    return {f"{V2}/memory.max": 2 * GiB}


def docker_v2_host_namespace(host: Host) -> dict[str, int]:
    """`docker run --cgroupns=host`: the whole tree, the process far down in it."""
    folder = "/system.slice/docker-0123abcd.scope"
    host.process(f"0::{folder}")
    host.mount("cgroup2", "/", V2)
    host.v2(f"{V2}/system.slice")
    host.v2(f"{V2}{folder}", 2 * GiB)
    return {f"{V2}{folder}/memory.max": 2 * GiB}


def docker_v1(host: Host) -> dict[str, int]:
    """The container's group is mounted, and /proc/self/cgroup has the host's path."""
    host.process("12:pids:/docker/0123", "5:memory:/docker/0123", "0::/docker/0123")
    host.mount("tmpfs", "/", V2)
    host.mount("cgroup", "/docker/0123", V1, "rw,memory")
    host.mount("cgroup", "/docker/0123", f"{V2}/pids", "rw,pids")
    host.v1(V1, 2 * GiB)
    return {f"{V1}/memory.limit_in_bytes": 2 * GiB}


def podman_rootless(host: Host) -> dict[str, int]:
    """`podman run --cgroupns=host --memory 3g`, as a user, whose slice has less."""
    user = "/user.slice/user-1000.slice"
    folder = f"{user}/user@1000.service/user.slice/libpod-0123.scope/container"
    host.process(f"0::{folder}")
    host.mount("cgroup2", "/", V2)
    host.v2(f"{V2}{user}", 2 * GiB)
    host.v2(f"{V2}{folder}")
    host.v2(f"{V2}{Path(folder).parent}", 3 * GiB)
    return {
        f"{V2}{Path(folder).parent}/memory.max": 3 * GiB,
        f"{V2}{user}/memory.max": 2 * GiB,
    }


def kubernetes_v2(host: Host) -> dict[str, int]:
    """A pod with a memory limit; memory.high is set with the MemoryQoS feature."""
    host.process("0::/")
    host.mount("cgroup2", "/", V2, "rw,nsdelegate,memory_recursiveprot")
    host.v2(V2, 8 * GiB)
    host.write(f"{V2}/memory.high", f"{7 * GiB}\n")
    return {f"{V2}/memory.max": 8 * GiB, f"{V2}/memory.high": 7 * GiB}


def kubernetes_v1(host: Host) -> dict[str, int]:
    """A container without a limit in a pod with one, which it sees in a sum only."""
    folder = "/kubepods/burstable/pod12/34"
    host.process(f"9:memory:{folder}")
    host.mount("cgroup", folder, V1, "rw,memory")
    host.v1(V1, hierarchical_memory_limit=4 * GiB)
    return {"": 4 * GiB}


def systemd_slice(host: Host) -> dict[str, int]:
    """MemoryMax= of a slice, MemoryHigh= of the service in it."""
    host.process("0::/inference.slice/vllm.service")
    host.mount("cgroup2", "/", V2)
    host.v2(f"{V2}/inference.slice", 4 * GiB)
    host.v2(f"{V2}/inference.slice/vllm.service")
    host.write(f"{V2}/inference.slice/vllm.service/memory.high", f"{3 * GiB}\n")
    return {
        f"{V2}/inference.slice/vllm.service/memory.high": 3 * GiB,
        f"{V2}/inference.slice/memory.max": 4 * GiB,
    }


def systemd_hybrid(host: Host) -> dict[str, int]:
    """A systemd with both versions: memory is a controller of version 1."""
    path = "/system.slice/vllm.service"
    host.process("1:name=systemd:" + path, "4:memory:" + path, "0::" + path)
    host.mount("tmpfs", "/", V2)
    host.mount("cgroup2", "/", f"{V2}/unified")
    host.mount("cgroup", "/", f"{V2}/systemd", "rw,xattr,name=systemd")
    host.mount("cgroup", "/", V1, "rw,memory")
    (host.root / f"{V2}/unified{path}".lstrip("/")).mkdir(parents=True)
    host.v1(V1)
    host.v1(f"{V1}/system.slice")
    host.v1(f"{V1}{path}", 2 * GiB)
    return {f"{V1}{path}/memory.limit_in_bytes": 2 * GiB}


def lxc_v2(host: Host) -> dict[str, int]:
    """The container's limit is above the namespace: only lxcfs's meminfo has it."""
    host.process("0::/init.scope")
    host.mount("cgroup2", "/", V2)
    host.v2(f"{V2}/init.scope")
    host.memory = SimpleNamespace(total=2 * GiB, available=GiB)
    return {}


def lxc_v1(host: Host) -> dict[str, int]:
    """A container whose mount begins above the group that the process is in."""
    host.process("7:memory:/lxc/box/system.slice/vllm.service")
    host.mount("cgroup", "/lxc/box", V1, "rw,memory")
    host.v1(V1, 3 * GiB)
    host.v1(f"{V1}/system.slice")
    host.v1(f"{V1}/system.slice/vllm.service", 2 * GiB)
    return {
        f"{V1}/system.slice/vllm.service/memory.limit_in_bytes": 2 * GiB,
        f"{V1}/memory.limit_in_bytes": 3 * GiB,
    }


def mounted_over(host: Host) -> dict[str, int]:
    """A group that is bind-mounted over the root hides what was there."""
    host.process("4:memory:/vllm/test")
    host.mount("cgroup", "/", V1, "rw,memory")
    host.mount("cgroup", "/vllm/test", V1, "rw,memory")
    host.v1(V1, 2 * GiB)
    return {f"{V1}/memory.limit_in_bytes": 2 * GiB}


def moved_out_of_the_namespace(host: Host) -> dict[str, int]:
    """The group is beside the namespace's root, where this process sees nothing."""
    host.process("0::/../other")
    host.mount("cgroup2", "/", V2)
    host.v2(V2, 2 * GiB)
    return {f"{V2}/memory.max": 2 * GiB}


def mount_above_the_namespace(host: Host) -> dict[str, int]:
    """A mount from outside, with names that this process cannot know."""
    host.process("0::/")
    host.mount("cgroup2", "/../..", V2)
    host.v2(V2, 2 * GiB)
    return {f"{V2}/memory.max": 2 * GiB}


def mount_from_outside_the_namespace(host: Host) -> dict[str, int]:
    """The process's path begins at its namespace, and the mount's does not."""
    host.process("4:memory:/")
    host.mount("cgroup", "/docker/0123", V1, "rw,memory")
    host.v1(V1, 2 * GiB)
    return {f"{V1}/memory.limit_in_bytes": 2 * GiB}


def removed_group(host: Host) -> dict[str, int]:
    """The process outlived its group, the one above still counts."""
    host.process("0::/a.slice/gone.scope (deleted)")
    host.mount("cgroup2", "/", V2)
    host.v2(f"{V2}/a.slice", 2 * GiB)
    return {f"{V2}/a.slice/memory.max": 2 * GiB}


def odd_names(host: Host) -> dict[str, int]:
    """Colons, spaces and a mount point with a space, which mountinfo escapes."""
    host.process("0::/a:b/c d")
    host.mount("cgroup2", "/", "/mnt/control\\040groups")
    host.v2("/mnt/control groups/a:b/c d", 2 * GiB)
    return {"/mnt/control groups/a:b/c d/memory.max": 2 * GiB}


def unlimited(host: Host) -> dict[str, int]:
    host.process("4:memory:/a", "0::/a")
    host.mount("cgroup2", "/", f"{V2}/unified")
    host.mount("cgroup", "/", V1, "rw,memory")
    host.v2(f"{V2}/unified/a")
    host.v1(V1, hierarchical_memory_limit=V1_UNLIMITED)
    host.v1(f"{V1}/a", hierarchical_memory_limit=V1_UNLIMITED)
    return {}


def no_controller(host: Host) -> dict[str, int]:
    host.process("3:cpu:/a", "0::/")
    host.mount("cgroup", "/", f"{V2}/cpu", "rw,cpu")
    return {}


def no_files(host: Host) -> dict[str, int]:
    """A sandbox, or no Linux."""
    return {}


LAYOUTS = [
    docker_v2,
    docker_v2_host_namespace,
    docker_v1,
    podman_rootless,
    kubernetes_v2,
    kubernetes_v1,
    systemd_slice,
    systemd_hybrid,
    lxc_v2,
    lxc_v1,
    mounted_over,
    moved_out_of_the_namespace,
    mount_above_the_namespace,
    mount_from_outside_the_namespace,
    removed_group,
    odd_names,
    unlimited,
    no_controller,
    no_files,
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_limits_of_a_layout(host: Host, layout) -> None:
    expected = layout(host)

    assert host.limits() == expected
    limits = limits_of_node(0, str(host.root))
    least = 2 * GiB if layout is lxc_v2 else 64 * GiB
    assert min(limit.limit for limit in limits) == min([least, *expected.values()])


def test_more_in_use_than_the_limit_leaves_nothing(host: Host) -> None:
    """A limit that was lowered below the usage is kept in time, not at once."""
    host.process("0::/")
    host.mount("cgroup2", "/", V2)
    host.v2(V2, GiB, 2 * GiB)

    assert host.available() == [0]


def test_group_with_the_least_left_is_not_the_one_with_the_least_limit(
    host: Host,
) -> None:
    host.process("0::/a/b")
    host.mount("cgroup2", "/", V2)
    host.v2(f"{V2}/a", 8 * GiB, 7 * GiB)
    host.v2(f"{V2}/a/b", 4 * GiB, 2 * GiB)

    limits = cgroup_limits(str(host.root))

    assert min(limits, key=lambda limit: limit.limit).limit == 4 * GiB
    fullest = min(limits, key=lambda limit: limit.available)
    assert fullest.name == f"control group /a ({host.root}{V2}/a/memory.max)"


def test_limit_that_changes_is_read_again(host: Host) -> None:
    docker_v2(host)
    before = host.limits()

    host.write(f"{V2}/memory.max", f"{GiB}\n")

    assert before == {f"{V2}/memory.max": 2 * GiB}
    assert host.limits() == {f"{V2}/memory.max": GiB}


def test_node_is_bounded_by_the_host(host: Host) -> None:
    node = "sys/devices/system/node/node1/meminfo"
    sizes = {
        "MemTotal": 32 * GiB,
        "MemFree": GiB,
        "Active(file)": GiB,
        "Inactive(file)": GiB,
        "SReclaimable": GiB,
    }
    lines = [f"Node 1 {name}: {size // 1024} kB\n" for name, size in sizes.items()]
    host.write(node, "".join(lines) + "Node 1 HugePages_Total:     0\n")

    by_name = {limit.name: limit for limit in limits_of_node(1, str(host.root))}

    assert by_name["memory node 1"].limit == 32 * GiB
    assert by_name["memory node 1"].available == 4 * GiB
    assert by_name["the memory of this host"].available == 60 * GiB


def test_lines_and_files_that_cannot_be_read_are_skipped(host: Host) -> None:
    host.process("", "no colon", "0:", "0::/")
    host.mounts = ["\n", "30 23\n", "31 23 0:29 / /elsewhere rw - cgroup\n"]
    host.mount("cgroup2", "/", V2)
    host.v2(V2, 2 * GiB)
    host.write(f"{V2}/memory.current", "many\n")
    host.write(f"{V2}/memory.stat", "\nanon\nfile \xff\n")
    (host.root / f"{V2}/memory.high".lstrip("/")).unlink()
    (host.root / f"{V2}/memory.high".lstrip("/")).mkdir()
    host.write("sys/devices/system/node/node1/meminfo", "\nNode 1\nNode 1 MemTotal:\n")

    assert host.limits() == {f"{V2}/memory.max": 2 * GiB}
    assert host.available() == [pytest.approx(2 * GiB, rel=0.01)]
    assert node_limit(1, str(host.root)) is None
