# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The functions by which the engine sizes a KV cache, wherever a release has them.

Up to 0.32.0 they are in `kv_cache_utils`. 0.33.0 has them in `kv_cache_planning`,
where they take the platform's builder first and the groups of all ranks last.
"""

from collections.abc import Sequence

from vllm.config import VllmConfig
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

try:
    from vllm.v1.core import kv_cache_planning  # type: ignore[attr-defined]
except ImportError:
    kv_cache_planning = None

KVCacheSpecs = Sequence[dict[str, KVCacheSpec]]
"""The specs of each rank's layers, by layer name."""


def get_kv_cache_configs(
    vllm_config: VllmConfig, kv_cache_specs: KVCacheSpecs, num_bytes: int
) -> list[KVCacheConfig]:
    """Return the cache that each rank makes of num_bytes.

    If max_model_len is to be found, it is set to what num_bytes holds.

    Raises:
        ValueError: If the engine would not start with so few.

    """
    specs = list(kv_cache_specs)
    available = [num_bytes] * len(specs)
    if kv_cache_planning is None:
        return kv_cache_utils.get_kv_cache_configs(vllm_config, specs, available)
    groups = kv_cache_planning.get_global_kv_cache_groups(vllm_config, specs)
    return kv_cache_planning.get_kv_cache_configs(vllm_config, specs, available, groups)


def pool_bytes_per_block(
    vllm_config: VllmConfig, groups: list[KVCacheGroupSpec]
) -> int:
    """Return the bytes of one block, of all layers of the groups."""
    if kv_cache_planning is None:
        return kv_cache_utils._pool_bytes_per_block(vllm_config, groups)
    if not any(group.layer_names for group in groups):
        return 0  # of a pipeline stage without such layers; the builder divides by it
    return kv_cache_planning._pool_bytes_per_block_from_builder(
        _builder(vllm_config), vllm_config, groups
    )


def max_memory_usage_bytes(
    vllm_config: VllmConfig, groups: list[KVCacheGroupSpec]
) -> int:
    """Return the bytes that the engine counts for a request of max_model_len."""
    if kv_cache_planning is None:
        return kv_cache_utils._max_memory_usage_bytes_from_groups(vllm_config, groups)
    return kv_cache_planning._max_memory_usage_bytes_from_groups(
        _builder(vllm_config), vllm_config, groups
    )


def _builder(vllm_config: VllmConfig):
    from vllm.v1.core import kv_cache_config_builder  # type: ignore[attr-defined]

    return kv_cache_config_builder.get_kv_cache_config_builder(vllm_config)
