# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the workers of an engine would say of their KV cache, without workers.

Each rank's layers are built on the meta device, so there are no weights, no cache
and no other process, and then asked by the functions that a worker calls.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from vllm.config import (
    CompilationMode,
    ModelConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.config.vllm import get_layers_from_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.model_executor.model_loader import (
    BaseModelLoader,
    get_model,
    register_model_loader,
)
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
from vllm.v1.worker.utils import select_common_block_size


class WorkerSpecs(NamedTuple):
    """What one worker reports before its KV cache is sized."""

    kv_cache_spec: dict[str, KVCacheSpec]
    """The spec of each layer that has a KV cache, by layer name."""
    supported_layouts: list[str]
    """The names of the KV cache layouts it supports, most preferred first."""
    block_size: int
    """`cache_config.block_size` once the attention backends have been asked."""
    weight_bytes: int
    """The parameters of the model and its draft model, as they are built."""


class NoWeightsLoader(BaseModelLoader):
    """Builds a model and loads nothing into it."""

    def download_model(self, model_config: ModelConfig) -> None:
        pass

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        pass

    def load_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> nn.Module:
        try:
            with set_default_torch_dtype(model_config.dtype), torch.device("meta"):
                return self.create_model(vllm_config, model_config, prefix)
        except (NotImplementedError, RuntimeError) as error:
            if "meta" not in str(error):
                raise
            raise ValueError(
                f"{model_config.architecture} needs real weights while it is built, "
                "so it cannot be planned; start the engine with "
                f"VLLM_CPU_KVCACHE_SPACE=fit and read the budget in its log ({error})"
            ) from error


@cache
def no_weights() -> str:
    """Return the load format of that loader, which is registered once."""
    register_model_loader("no_weights")(NoWeightsLoader)
    return "no_weights"


class FakeGroupCoordinator(parallel_state.GroupCoordinator):
    """A process group that knows its ranks and talks to none of them."""

    def __init__(
        self,
        group_ranks: list[list[int]],
        local_rank: int,
        torch_distributed_backend: str,
        use_device_communicator: bool,
        use_message_queue_broadcaster: bool = False,
        group_name: str | None = None,
        use_all2all: bool = False,
    ) -> None:
        self.unique_name = parallel_state._get_unique_name(group_name or "fake")
        parallel_state._register_group(self)
        self.rank = torch.distributed.get_rank()
        self.local_rank = self.device_index = local_rank
        self.ranks = next(ranks for ranks in group_ranks if self.rank in ranks)
        self.group_ranks = group_ranks
        self.world_size = len(self.ranks)
        self.rank_in_group = self.ranks.index(self.rank)
        self.torch_distributed_backend = torch_distributed_backend
        self.cpu_group = torch.distributed.new_group(self.ranks, backend="fake")
        self.device_group = self.cpu_group
        self.device = torch.device("cpu")
        self.use_device_communicator = False
        self.device_communicator = None
        self.mq_broadcaster = None

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Add nothing up: a model may embed tokens while it is built, without data."""
        return input_

    def destroy(self) -> None:
        """Nothing is held; the process group ends with the world's."""


@contextmanager
def fake_groups() -> Iterator[None]:
    """Let `parallel_state` make groups that are not connected, for a while."""
    connected = parallel_state.GroupCoordinator
    parallel_state.GroupCoordinator = FakeGroupCoordinator
    try:
        yield
    finally:
        parallel_state.GroupCoordinator = connected


@contextmanager
def without_shared_layers() -> Iterator[None]:
    """Empty a cache of layers, so that no engine of this process finds ours in it."""
    of_engines = dict(_ROPE_DICT)
    _ROPE_DICT.clear()
    try:
        yield
    finally:
        _ROPE_DICT.clear()
        _ROPE_DICT.update(of_engines)


@contextmanager
def acting_as_rank(vllm_config: VllmConfig, rank: int) -> Iterator[None]:
    """Let this process look to a model like one rank of the engine.

    The engine's own code lays out the groups; only the connections are missing.

    Args:
        vllm_config: The engine's configuration.
        rank: The rank within one data parallel replica.

    Raises:
        RuntimeError: If this process belongs to an engine already.

    """
    parallel_config = vllm_config.parallel_config
    if torch.distributed.is_initialized():
        raise RuntimeError("this process is already a rank of an engine")
    torch.distributed.init_process_group(
        "fake",
        store=FakeStore(),
        rank=parallel_config.data_parallel_rank * parallel_config.world_size + rank,
        world_size=parallel_config.world_size_across_dp,
    )
    try:
        with fake_groups(), set_current_vllm_config(vllm_config):
            world = parallel_state.init_world_group(
                list(range(torch.distributed.get_world_size())), rank, "fake"
            )
            parallel_state._replace_active_groups(
                world=world, dp=None, ep=None, eplb=None, node_count=1
            )
            parallel_state.initialize_model_parallel(
                parallel_config.tensor_parallel_size,
                parallel_config.pipeline_parallel_size,
                parallel_config.prefill_context_parallel_size,
                parallel_config.decode_context_parallel_size,
                "fake",
            )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def proposer_class(spec_config: SpeculativeConfig) -> type:
    """Return the class with which the model runner would build the draft model."""
    from vllm.v1.spec_decode.dflash import DFlashProposer
    from vllm.v1.spec_decode.draft_model import DraftModelProposer
    from vllm.v1.spec_decode.eagle import EagleProposer
    from vllm.v1.spec_decode.gemma4 import Gemma4Proposer
    from vllm.v1.spec_decode.step3p5 import Step3p5MTPProposer

    if spec_config.uses_draft_model():
        return DraftModelProposer
    if spec_config.use_gemma4_mtp():
        return Gemma4Proposer
    if spec_config.use_step3p5_mtp():
        return Step3p5MTPProposer
    if spec_config.use_dflash():
        return DFlashProposer
    return EagleProposer


def build_draft_layers(vllm_config: VllmConfig) -> nn.Module | None:
    """Add the layers of the draft model to the target's, as the model runner does.

    A proposer has buffers of the size of a batch, so only its part that builds the
    model is used. Methods without a KV cache of their own add nothing.

    Returns:
        The draft model, None if nothing is added.

    """
    spec_config = vllm_config.speculative_config
    if spec_config is None or not spec_config.uses_draft_kv_cache():
        return None
    if spec_config.uses_extract_hidden_states():
        return get_model(
            vllm_config=vllm_config, model_config=spec_config.draft_model_config
        )
    target_layers = set(
        get_layers_from_vllm_config(
            vllm_config,
            AttentionLayerBase,  # type: ignore[type-abstract]
        )
    )
    proposer: Any = object.__new__(proposer_class(spec_config))
    proposer.vllm_config = vllm_config
    proposer.speculative_config = spec_config
    proposer.model = proposer._get_model()
    if spec_config.use_gemma4_mtp():
        proposer._setup_gemma4_kv_sharing(target_layers)
    return proposer.model


def batch_of_one_token() -> CommonAttentionMetadata:
    """Return the metadata of a batch with one request of one token."""
    start = torch.tensor([0, 1], dtype=torch.int32)
    one = torch.ones(1, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=start,
        query_start_loc_cpu=start,
        seq_lens=one,
        num_reqs=1,
        num_actual_tokens=1,
        max_query_len=1,
        max_seq_len=1,
        block_table_tensor=one.view(1, 1),
        slot_mapping=torch.zeros(1, dtype=torch.int64),
    )


def check_backends(
    vllm_config: VllmConfig, kv_cache_spec: dict[str, KVCacheSpec]
) -> None:
    """Refuse what the backend of a layer would refuse once it runs.

    Raises:
        ValueError: If a backend takes neither the block size nor a part of it.
        NotImplementedError: If it has no fp8 cache for the layer's head size.
        RuntimeError: If it has no kernels for the head size.

    """
    layers = get_layers_from_vllm_config(
        vllm_config,
        AttentionLayerBase,  # type: ignore[type-abstract]
    )
    for name, spec in kv_cache_spec.items():
        if isinstance(spec, AttentionSpec) and spec.has_layer_views:
            backend = layers[name].get_attn_backend()
            select_common_block_size(spec.block_size, [backend], [spec])
            if backend is CPUAttentionBackend:
                device = torch.device("cpu")
                builder = backend.get_builder_cls()(spec, [name], vllm_config, device)
                # The kernels themselves refuse a head size, when they are asked for
                # the first batch: ask for one of a single token.
                builder.build(0, batch_of_one_token())


def worker_specs(vllm_config: VllmConfig, rank: int) -> WorkerSpecs:
    """Return what the worker of a rank would report.

    Args:
        vllm_config: The engine's configuration, which stays as it is.
        rank: The rank within one data parallel replica.

    Raises:
        ValueError: If the platform or the model refuses the configuration.

    """
    config = copy.deepcopy(vllm_config)
    config.parallel_config.rank = rank
    config.load_config.load_format = no_weights()
    # Nothing runs, so nothing is compiled and the compiler is not imported.
    config.compilation_config.mode = CompilationMode.NONE
    if config.speculative_config is not None:
        config.speculative_config.draft_load_config = None
    with (
        acting_as_rank(config, rank),
        without_shared_layers(),
        set_current_vllm_config(config),
    ):
        models = [get_model(vllm_config=config)]
        if parallel_state.get_pp_group().is_last_rank and (
            draft := build_draft_layers(config)
        ):
            models.append(draft)
        current_platform.update_block_size_for_backend(config)
        layouts = get_supported_kv_cache_layouts(get_current_attn_backends(config))
        kv_cache_spec = get_kv_cache_spec(config)
        check_backends(config, kv_cache_spec)
        return WorkerSpecs(
            kv_cache_spec=kv_cache_spec,
            supported_layouts=[layout.name for layout in layouts],
            block_size=config.cache_config.block_size,
            weight_bytes=sum(
                parameter.nbytes for model in models for parameter in model.parameters()
            ),
        )


def specs_of_all_stages(vllm_config: VllmConfig) -> list[WorkerSpecs]:
    """Return what the first tensor parallel rank of each pipeline stage reports.

    The engine refuses to start when other ranks of a stage have other specs.
    """
    parallel_config = vllm_config.parallel_config
    ranks_per_stage = (
        parallel_config.world_size // parallel_config.pipeline_parallel_size
    )
    return [
        worker_specs(vllm_config, rank)
        for rank in range(0, parallel_config.world_size, ranks_per_stage)
    ]
