"""Models of transformers, small and with random weights, and one call of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as t

Case = tuple[Any, dict[str, Any]]
_SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 100,
    "max_position_embeddings": 64,
}  # fmt: skip


def _text(cls: Any, config: Any, mask: bool = True) -> Case:
    ids = torch.randint(2, 90, (2, 7))
    attention = torch.ones(2, 7, dtype=torch.long)
    attention[1, 5:] = 0
    return cls(config), {"input_ids": ids, **({"attention_mask": attention} if mask else {})}


def _image(cls: Any, config: Any) -> Case:
    return cls(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


def _whisper() -> Case:
    config = t.WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=100, num_mel_bins=8, max_source_positions=20, pad_token_id=1,
        bos_token_id=2, eos_token_id=3, decoder_start_token_id=2,
    )  # fmt: skip
    return t.WhisperModel(config).encoder, {"input_features": torch.randn(2, 8, 40)}


class Pooled(torch.nn.Module):  # type: ignore[misc]
    """The mean over the tokens of a sentence, at length 1: as sentence-transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = t.BertModel(t.BertConfig(**_SIZES))

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        states = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(states.dtype)
        mean = (states * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(mean, dim=-1)


def _pooled() -> Case:
    return Pooled(), _text(t.BertModel, t.BertConfig(**_SIZES))[1]


_VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "use_cache": False}
_STAGES = {"hidden_sizes": [8, 16, 32, 32], "depths": [1, 1, 2, 1]}
FAMILIES: dict[str, Callable[[], Case]] = {
    "bert": lambda: _text(t.BertModel, t.BertConfig(**_SIZES)),
    "roberta": lambda: _text(t.RobertaModel, t.RobertaConfig(**_SIZES)),
    "distilbert": lambda: _text(
        t.DistilBertModel,
        t.DistilBertConfig(dim=32, n_layers=2, n_heads=4, hidden_dim=64, vocab_size=100, max_position_embeddings=64),
    ),
    "pooled": _pooled,
    "clip_text": lambda: _text(t.CLIPTextModel, t.CLIPTextConfig(**_SIZES, eos_token_id=99, bos_token_id=98)),
    "gpt2": lambda: _text(
        t.GPT2Model, t.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100, n_positions=64, use_cache=False)
    ),
    "t5": lambda: _text(
        t.T5EncoderModel, t.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=100)
    ),
    "llama": lambda: _text(t.LlamaForCausalLM, t.LlamaConfig(**_GROUPED), mask=False),
    "qwen3": lambda: _text(t.Qwen3ForCausalLM, t.Qwen3Config(**_GROUPED, head_dim=8), mask=False),
    "vit": lambda: _image(t.ViTModel, t.ViTConfig(**_VISION, intermediate_size=64)),
    "dinov2": lambda: _image(t.Dinov2Model, t.Dinov2Config(**_VISION)),
    "clip_vision": lambda: _image(t.CLIPVisionModel, t.CLIPVisionConfig(**_VISION, intermediate_size=64)),
    "whisper": _whisper,
    "resnet": lambda: _image(t.ResNetModel, t.ResNetConfig(embedding_size=8, **_STAGES)),
    "convnext": lambda: _image(t.ConvNextModel, t.ConvNextConfig(image_size=32, **_STAGES)),
}
