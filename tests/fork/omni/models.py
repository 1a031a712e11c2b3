# SPDX-License-Identifier: Apache-2.0
"""Folders with the configuration of a model and nothing else."""

import json
from pathlib import Path
from typing import Any

# Qwen3-TTS: the talker's geometry decides its cache, the rest is small.
QWEN3_TTS: dict[str, Any] = {
    "architectures": ["Qwen3TTSForConditionalGeneration"],
    "model_type": "qwen3_tts",
    "tts_model_type": "base",
    "torch_dtype": "bfloat16",
    "talker_config": {
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "num_attention_heads": 16,
        "head_dim": 128,
        "hidden_size": 256,
        "intermediate_size": 256,
        "text_hidden_size": 256,
        "vocab_size": 3072,
        "text_vocab_size": 4096,
        "num_code_groups": 16,
        "max_position_embeddings": 32768,
        "code_predictor_config": {
            "vocab_size": 2048,
            "num_hidden_layers": 1,
            "num_code_groups": 16,
            "hidden_size": 256,
            "intermediate_size": 256,
        },
    },
    "speaker_encoder_config": {"enc_dim": 256},
}
SPEECH_TOKENIZER = {
    "model_type": "qwen3_tts_tokenizer_12hz",
    "encoder_config": {"num_hidden_layers": 1},
    "decoder_config": {"num_hidden_layers": 1, "codebook_dim": 512},
}
FEATURE_EXTRACTOR = {
    "feature_extractor_type": "EncodecFeatureExtractor",
    "sampling_rate": 24000,
}


def write_json(folder: Path, **files: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def write_qwen3_tts(folder: Path, **talker: Any) -> Path:
    """Write the configuration of a Qwen3-TTS checkpoint, changed by talker."""
    config = QWEN3_TTS | {"talker_config": QWEN3_TTS["talker_config"] | talker}
    write_json(folder, config=config)
    write_json(
        folder / "speech_tokenizer",
        config=SPEECH_TOKENIZER,
        preprocessor_config=FEATURE_EXTRACTOR,
    )
    return folder


def llama(layers: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    """A model of full attention layers, nothing else of which takes memory."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": 64,
        "intermediate_size": 64,
        "vocab_size": 512,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }


def text(model_type: str, layers: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    """A part of a model that generates, with heads of 64."""
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "head_dim": 64,
        "hidden_size": 256,
        "intermediate_size": 64,
        "vocab_size": 8448,
        "max_position_embeddings": 32768,
        "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]},
        **more,
    }


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
AUDIO: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 1,
    "num_hidden_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "output_dim": 64,
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 256,
}

# Each part has a geometry of its own: 5 layers of 4 KV heads, 3 of 2.
QWEN2_5_OMNI: dict[str, Any] = {
    "architectures": ["Qwen2_5OmniModel"],
    "model_type": "qwen2_5_omni",
    "torch_dtype": "bfloat16",
    "thinker_config": {
        "audio_config": AUDIO,
        "vision_config": VISION | {"fullatt_block_indexes": [0]},
        "text_config": text("qwen2_5_omni_text", 5, 4),
    },
    "talker_config": text("qwen2_5_omni_talker", 3, 2, embedding_size=256),
    "token2wav_config": {"dit_config": {"num_hidden_layers": 1}},
}
QWEN3_OMNI: dict[str, Any] = {
    "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
    "model_type": "qwen3_omni_moe",
    "torch_dtype": "bfloat16",
    "thinker_config": {
        "audio_config": AUDIO,
        "vision_config": VISION
        | {
            "image_size": 64,
            "apply_vit_abs_pos_embed": True,
            "deepstack_visual_indexes": [0],
        },
        "text_config": text("qwen3_omni_moe_text", 5, 4, **EXPERTS),
    },
    "talker_config": {
        "accept_hidden_layer": 2,
        "num_code_groups": 16,
        "thinker_hidden_size": 256,
        "spatial_merge_size": 2,
        "speaker_id": {"ethan": 1},
        "text_config": text(
            "qwen3_omni_moe_talker_text",
            3,
            2,
            shared_expert_intermediate_size=32,
            **EXPERTS,
        ),
        "code_predictor_config": text(
            "qwen3_omni_moe_talker_code_predictor", 1, 2, num_code_groups=16
        ),
    },
    "code2wav_config": {"num_hidden_layers": 1, "hidden_size": 64, "decoder_dim": 64},
}
