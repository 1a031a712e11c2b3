#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Compile a release with Debian sid's compiler and torch, and run the engine's tests on it.
#
#   packaging/debian-sid.sh ROOT SDIST ONEDNN [RELEASE]   as root, with debootstrap
#
# ROOT is the folder that takes the system; run again, it goes on with what is there.
# SDIST is the release's, which is checked as always. ONEDNN is a source tree of the
# version that vLLM's CMake names. Takes 8 GB and, on 2 cores, about an hour for the
# variant avx2; VLLM_CPU_X86_VARIANTS chooses others.
set -eu
[ $# -ge 3 ] || { sed -n '3,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
root=$1 sdist=$2 onednn=$3 release=${4:-0.34.0}
here=$(cd "$(dirname "$0")/.." && pwd)
fail() { echo "debian-sid.sh: $*" >&2; exit 1; }
[ "$(id -u)" = 0 ] || fail "run it as root"
[ -f "$sdist" ] || fail "$sdist: no such file"
[ -f "$onednn/CMakeLists.txt" ] || fail "$onednn: not a source tree of oneDNN"
command -v debootstrap > /dev/null || fail "debootstrap is not installed"

[ -e "$root/made" ] || { debootstrap --variant=minbase sid "$root"; touch "$root/made"; }
trap 'for folder in proc sys dev; do umount "$root/$folder"; done' EXIT
trap 'exit 130' INT TERM
for folder in proc sys dev; do mount --bind "/$folder" "$root/$folder"; done
in_root() { chroot "$root" env DEBIAN_FRONTEND=noninteractive "$@"; }

in_root apt-get update -qq
in_root apt-get install -y -qq --no-install-recommends \
  g++-14 cmake ninja-build ccache git make patch procps \
  python3-dev python3-venv python3-pip python3-torch libtorch-dev libnuma-dev \
  libsleef-dev python3-cyclonedx-lib python3-packaging python3-setuptools \
  python3-setuptools-rust python3-setuptools-scm python3-wheel

mkdir -p "$root/fork" "$root/onednn"
git -C "$here" archive HEAD | tar -x -C "$root/fork"
cp "$sdist" "$root/fork/"
cp -r "$onednn/." "$root/onednn/"
for target in table test; do
  in_root env -C /fork CC=gcc-14 CXX=g++-14 CCACHE_DIR=/ccache HF_HUB_OFFLINE=1 \
    VLLM_CPU_X86_VARIANTS="${VLLM_CPU_X86_VARIANTS-avx2}" \
    FETCHCONTENT_SOURCE_DIR_ONEDNN=/onednn CPU_WHEEL_SDIST="/fork/$(basename "$sdist")" \
    make "$target" RELEASE="$release"
done
