"""Tiny models of transformers as their makers wrote them: classes, a batch, the modules that attend."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

BATCH, TOKENS, VOCAB, WIDTH, HEADS, LAYERS = 2, 11, 64, 32, 4, 2
SIZE = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
}
GPT_SIZE = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": VOCAB, "n_positions": 32}
BART_SIZE = {
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": VOCAB,
    "decoder_start_token_id": 1,
}
T5_SIZE = {
    "d_model": WIDTH,
    "d_kv": 8,
    "num_heads": HEADS,
    "d_ff": 48,
    "num_layers": LAYERS,
    "dropout_rate": 0.0,
    "vocab_size": VOCAB,
    "decoder_start_token_id": 1,
}
IMAGE_SIZE = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "image_size": 16,
    "patch_size": 4,
}
GROUPED = {**SIZE, "num_key_value_heads": 2}
WIDE_HEADS = {**GROUPED, "head_dim": 16}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def tokens() -> Tensor:
    return torch.randint(3, VOCAB, (BATCH, TOKENS))


def padding() -> Tensor:
    """The second sequence is shorter, filled up on the left."""
    mask = torch.ones(BATCH, TOKENS, dtype=torch.int64)
    mask[1, :4] = 0
    return mask


def text() -> dict[str, Any]:
    ids = tokens()
    return {"input_ids": ids, "labels": ids}


def padded_text() -> dict[str, Any]:
    return {**text(), "attention_mask": padding()}


def image(side: int = 16) -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 3, side, side), "labels": torch.tensor([0, 1])}


def sound() -> dict[str, Any]:
    return {"input_features": torch.randn(BATCH, 8, 20), "labels": tokens()}


def text_and_image() -> dict[str, Any]:
    both = {"input_ids": tokens(), "attention_mask": padding(), "pixel_values": image()["pixel_values"]}
    return {**both, "return_loss": True}


@dataclass
class Case:
    """A model of transformers: its class, its size, its batch, and the modules that attend."""

    model: str
    size: dict[str, Any]
    names: tuple[str, ...]
    batch: Callable[[], dict[str, Any]] = text
    kernels: tuple[str, ...] = ("sdpa", "eager")

    def build(self, kernel: str) -> nn.Module:
        kind = getattr(hf, self.model)
        config = kind.config_class(**SPECIAL, **self.size)
        model = kind._from_config(config, attn_implementation=kernel).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # a config's `dropout` says this under a dozen names
        return model

    def attending(self) -> list[str]:
        return sorted(name.format(layer) for name in self.names for layer in range(LAYERS))


DECODER = ("model.layers.{}.self_attn",)
FALCON = ("transformer.h.{}.self_attention",)
BOTH = (
    "model.encoder.layers.{}.self_attn",
    "model.decoder.layers.{}.self_attn",
    "model.decoder.layers.{}.encoder_attn",
)
CASES = {
    "gpt2": Case("GPT2LMHeadModel", GPT_SIZE, ("transformer.h.{}.attn",)),
    "gpt_neox": Case("GPTNeoXForCausalLM", SIZE, ("gpt_neox.layers.{}.attention",)),
    "llama": Case("LlamaForCausalLM", GROUPED, DECODER),
    "llama padded": Case("LlamaForCausalLM", GROUPED, DECODER, padded_text),
    "mistral": Case("MistralForCausalLM", {**GROUPED, "sliding_window": 4}, DECODER),
    "qwen2": Case(
        "Qwen2ForCausalLM",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        DECODER,
    ),
    "gemma2": Case(
        "Gemma2ForCausalLM",
        {**WIDE_HEADS, "sliding_window": 4, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 4},
        DECODER,
        padded_text,
        kernels=("eager",),
    ),
    "bert padded": Case("BertForMaskedLM", SIZE, ("bert.encoder.layer.{}.attention.self",), padded_text),
    "t5": Case(
        "T5ForConditionalGeneration",
        T5_SIZE,
        (
            "encoder.block.{}.layer.0.SelfAttention",
            "decoder.block.{}.layer.0.SelfAttention",
            "decoder.block.{}.layer.1.EncDecAttention",
        ),
        padded_text,
    ),
    "vit": Case(
        "ViTForImageClassification",
        {**IMAGE_SIZE, "intermediate_size": 48},
        ("vit.layers.{}.attention",),
        image,
    ),
    "whisper": Case(
        "WhisperForConditionalGeneration",
        {**BART_SIZE, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16},
        BOTH,
        sound,
    ),
    "gptj": Case("GPTJForCausalLM", {**GPT_SIZE, "rotary_dim": 4}, ("transformer.h.{}.attn",)),
    "gpt_neo": Case(
        "GPTNeoForCausalLM",
        {
            "hidden_size": WIDTH,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "vocab_size": VOCAB,
            "max_position_embeddings": 32,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
        },
        ("transformer.h.{}.attn.attention",),
        kernels=("eager",),
    ),
    "gpt_bigcode": Case(
        "GPTBigCodeForCausalLM",
        {**GPT_SIZE, "attn_pdrop": 0.0},
        ("transformer.h.{}.attn",),
        padded_text,
    ),
    "opt": Case(
        "OPTForCausalLM",
        {**SIZE, "ffn_dim": 48, "max_position_embeddings": 32, "word_embed_proj_dim": WIDTH},
        ("model.decoder.layers.{}.self_attn",),
        padded_text,
    ),
    "falcon": Case("FalconForCausalLM", SIZE, FALCON),
    "falcon alibi": Case("FalconForCausalLM", {**SIZE, "alibi": True}, FALCON, padded_text),
    "bloom": Case(
        "BloomForCausalLM",
        {"hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": VOCAB},
        FALCON,
        padded_text,
        kernels=("eager",),
    ),
    "mpt": Case(
        "MptForCausalLM",
        {"d_model": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "vocab_size": VOCAB, "max_seq_len": 32},
        ("transformer.blocks.{}.attn",),
        kernels=("eager",),
    ),
    "phi": Case("PhiForCausalLM", SIZE, DECODER),
    "phi3": Case("Phi3ForCausalLM", GROUPED, DECODER),
    "qwen3": Case("Qwen3ForCausalLM", WIDE_HEADS, DECODER),
    "gemma3": Case("Gemma3ForCausalLM", {**WIDE_HEADS, "sliding_window": 4}, DECODER),
    "granite": Case("GraniteForCausalLM", {**SIZE, "attention_multiplier": 0.5}, DECODER),
    "olmo2": Case("Olmo2ForCausalLM", SIZE, DECODER),
    "stablelm": Case("StableLmForCausalLM", GROUPED, DECODER),
    "cohere": Case("CohereForCausalLM", GROUPED, DECODER),
    "mixtral": Case("MixtralForCausalLM", {**GROUPED, "num_local_experts": 2}, DECODER),
    "deepseek_v3": Case(
        "DeepseekV3ForCausalLM",
        {
            **{**SIZE, "num_key_value_heads": HEADS},
            **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4},
            **{"v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2},
            **{"topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
        },
        DECODER,
    ),
    "bart": Case(
        "BartForConditionalGeneration",
        {**BART_SIZE, "max_position_embeddings": 32},
        BOTH,
        padded_text,
    ),
    "clip": Case(
        "CLIPModel",
        {
            "text_config": {**SIZE, "max_position_embeddings": 32, "projection_dim": WIDTH},
            "vision_config": {**IMAGE_SIZE, "intermediate_size": 48, "projection_dim": WIDTH},
            "projection_dim": WIDTH,
        },
        ("text_model.encoder.layers.{}.self_attn", "vision_model.encoder.layers.{}.self_attn"),
        text_and_image,
    ),
    "swin": Case(
        "SwinForImageClassification",
        {
            "image_size": 32,
            "embed_dim": 16,
            "depths": [2],
            "num_heads": [2],
            "window_size": 4,
            "drop_path_rate": 0.0,
        },
        ("swin.encoder.layers.0.blocks.{}.attention",),
        lambda: image(32),
    ),
    "dinov2": Case(
        "Dinov2ForImageClassification",
        {**IMAGE_SIZE, "mlp_ratio": 2},
        ("dinov2.encoder.layer.{}.attention",),
        image,
    ),
}
# Attention that is not softmax(q k^T * scale + bias) v over all its keys, or none at all.
OTHERS = {
    "deberta (disentangled)": Case(
        "DebertaV2ForMaskedLM",
        {**SIZE, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_position_embeddings": 32},
        ("deberta.encoder.layer.{}.attention.self",),
        padded_text,
    ),
    "gpt_oss (sinks)": Case(
        "GptOssForCausalLM",
        {**WIDE_HEADS, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4},
        DECODER,
    ),
    "xlnet (two streams of scores)": Case(
        "XLNetLMHeadModel",
        {"d_model": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "d_inner": 48, "vocab_size": VOCAB},
        ("transformer.layer.{}.rel_attn",),
    ),
    "longformer (bands)": Case(
        "LongformerForMaskedLM",
        {**SIZE, "attention_window": 4, "max_position_embeddings": 64},
        ("longformer.encoder.layer.{}.attention.self",),
    ),
    "long_t5 (blocks)": Case(
        "LongT5ForConditionalGeneration",
        {**T5_SIZE, "local_radius": 3},
        ("encoder.block.{}.layer.0.LocalSelfAttention",),
    ),
}
NO_ATTENTION = {
    "mamba": Case("MambaForCausalLM", {**SIZE, "state_size": 4}, ()),
    "fnet": Case("FNetForMaskedLM", SIZE, ()),
}
