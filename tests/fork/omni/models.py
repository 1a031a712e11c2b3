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


# What a pipeline is chosen by: none of its stages' models is built.
QWEN2_5_OMNI: dict[str, Any] = {
    "architectures": ["Qwen2_5OmniModel"],
    "model_type": "qwen2_5_omni",
    "torch_dtype": "bfloat16",
}
