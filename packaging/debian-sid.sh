#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Compile a release with nothing but Debian sid's packages, and run what comes out.
#
#   packaging/debian-sid.sh ROOT SDIST [RELEASE]      as root, with debootstrap
#
# ROOT is the folder that takes the system; run again, it goes on with what is there.
# SDIST is the release's, which is checked as always. oneDNN is the source package of
# trixie, as sid has its library only. Takes 7 GB and, on 2 cores, about an hour.
set -eu
[ $# -ge 2 ] || { sed -n '3,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
root=$1 sdist=$2 release=${3:-0.33.0}
here=$(cd "$(dirname "$0")/.." && pwd)
[ "$(id -u)" = 0 ] || { echo "debian-sid.sh: run it as root" >&2; exit 1; }
[ -f "$sdist" ] || { echo "debian-sid.sh: $sdist: no such file" >&2; exit 1; }
command -v debootstrap > /dev/null ||
  { echo "debian-sid.sh: debootstrap is not installed" >&2; exit 1; }

[ -e "$root/made" ] || { debootstrap --variant=minbase sid "$root"; touch "$root/made"; }
trap 'for folder in proc sys dev; do umount "$root/$folder"; done' EXIT
for folder in proc sys dev; do mount --bind "/$folder" "$root/$folder"; done
in_root() { chroot "$root" env DEBIAN_FRONTEND=noninteractive "$@"; }

in_root apt-get update -qq
in_root apt-get install -y -qq --no-install-recommends \
  g++-14 cmake ninja-build ccache git patch procps \
  python3-dev python3-venv python3-pip python3-torch libtorch-dev libnuma-dev \
  libsleef-dev python3-cyclonedx-lib python3-packaging python3-setuptools \
  python3-setuptools-rust python3-setuptools-scm python3-wheel dpkg-dev
if ! [ -d "$root/onednn-3.7.2" ]; then
  sed 's/^deb \(.*\) sid/deb-src \1 trixie/' "$root/etc/apt/sources.list" \
    > "$root/etc/apt/sources.list.d/trixie-source.list"
  in_root apt-get update -qq
  in_root apt-get source -qq onednn
fi

mkdir -p "$root/fork"
git -C "$here" archive HEAD | tar -x -C "$root/fork"
cp "$sdist" "$root/fork/"
in_root env -C /fork CC=gcc-14 CXX=g++-14 CCACHE_DIR=/ccache \
  VLLM_USE_PRECOMPILED=0 VLLM_CPU_X86_VARIANTS="${VLLM_CPU_X86_VARIANTS-avx2}" \
  FETCHCONTENT_SOURCE_DIR_ONEDNN=/onednn-3.7.2 CPU_WHEEL_RELEASE="$release" \
  CPU_WHEEL_SDIST="/fork/$(basename "$sdist")" python3 -m cpu_wheel wheel

# What vLLM imports and Debian has not; torch stays Debian's.
in_root sh -c "python3 -m venv --system-site-packages /venv &&
  /venv/bin/python -m pip install -q -r /fork/build/compiled-$release/requirements/common.txt &&
  /venv/bin/python -m pip install -q -c /fork/constraints.txt pytest pytest-forked pytest-timeout &&
  /venv/bin/python -m pip install -q --no-deps --force-reinstall \
    /fork/dist/vllm-$release+cpu.*-linux_*.whl"
in_root env -C /fork HF_HUB_OFFLINE=1 /venv/bin/python -m pytest -q \
  -p no:cacheprovider -o junit_family=xunit1 --junitxml=/fork/allocation.xml \
  tests/platforms/test_cpu_kv_cache_allocation.py
echo "$root/fork/allocation.xml"
