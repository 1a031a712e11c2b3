# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Models of every kind of KV cache, with dummy weights and few of them.

Only what a KV cache is made of has the size of a real model.
"""

import json
from pathlib import Path
from typing import Any

TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "eos_token_id": 511,
    "bos_token_id": 510,
}


def qwen3(layers: int = 2, kv_heads: int = 8, **kwargs: Any) -> dict[str, Any]:
    return TINY | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        **kwargs,
    }


def gemma3(layer_types: list[str], window: int = 128) -> dict[str, Any]:
    return TINY | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": len(layer_types),
        "layer_types": layer_types,
        "sliding_window": window,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 128,
    }


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

MLA = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_hidden_layers": 2,
    "num_key_value_heads": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 2,
    "rope_theta": 10000.0,
}

MODELS: dict[str, dict[str, Any]] = {
    "talker": qwen3(layers=28),
    "full": qwen3(),
    "four-layers": qwen3(layers=4),
    "multi-query": qwen3(kv_heads=1),
    "reference": gemma3([SLIDING if i % 5 == 4 else FULL for i in range(35)]),
    "alternating": gemma3([SLIDING, FULL] * 3),
    "sliding": TINY
    | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "sliding_window": 128,
    },
    "chunked-local": TINY
    | {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "attention_chunk_size": 256,
        "no_rope_layers": [1, 1, 1, 0],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 64,
        "use_qk_norm": True,
    },
    "mla": TINY | MLA,
    "mtp": TINY
    | MLA
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 3,
        "n_group": 1,
        "topk_group": 1,
    },
    "linear-hybrid": TINY
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    "mamba-hybrid": TINY
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "hidden_size": 512,
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "mamba", "mamba", "attention"],
        "num_key_value_heads": 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 128,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 64,
    },
    "mamba": {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_heads": 4,
        "head_dim": 32,
        "state_size": 16,
        "n_groups": 1,
        "conv_kernel": 4,
        "expand": 2,
        "chunk_size": 64,
        "vocab_size": 512,
        "torch_dtype": "bfloat16",
        "eos_token_id": 511,
    },
    "short-conv": TINY
    | {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "layer_types": ["conv", "conv", "conv", FULL],
        "num_key_value_heads": 2,
        "hidden_size": 512,
        "block_dim": 512,
        "conv_dim": 512,
        "conv_L_cache": 3,
        "block_ff_dim": 64,
        "block_auto_adjust_ff_dim": False,
        "norm_eps": 1e-5,
    },
    "encoder-decoder": {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "d_model": 256,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "num_mel_bins": 80,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "vocab_size": 51866,
        "torch_dtype": "bfloat16",
        "is_encoder_decoder": True,
    },
    "sinks": TINY
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "sliding_window": 128,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "rope_theta": 150000.0,
    },
    "embedding-decoder": qwen3(architectures=["Qwen3Model"]),
    "embedding-encoder": {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_size": 256,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 512,
        "max_position_embeddings": 512,
        "torch_dtype": "bfloat16",
    },
}
# With layers of both kinds in each of two pipeline stages.
MODELS["linear-hybrid-twice"] = MODELS["linear-hybrid"] | {
    "num_hidden_layers": 8,
    "layer_types": [LINEAR, LINEAR, LINEAR, FULL] * 2,
}


# Those whose engine wants a tokenizer, whatever the prompts are.
WITH_TOKENIZER = {"encoder-decoder", "embedding-decoder", "embedding-encoder"}


def write_model(folder: Path, config: dict[str, Any]) -> str:
    """Write a config.json and return the folder, as --model takes it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer of vocab_size words, and an extractor of audio features."""
    words = {f"w{i}": i for i in range(vocab_size - 3)}
    special = ["<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>"]
    words |= {word: len(words) + i for i, word in enumerate(special)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": words[word],
                "content": word,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for word in special
        ],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": special[0]},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {"eos_token": special[0], "pad_token": special[0], "unk_token": special[0]}
    names["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    extractor = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 80,
        "processor_class": "WhisperProcessor",
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor))
