"""monoplan.nn: modules, parameters and layers, with PyTorch's names."""

from monoplan.frontend.kv_cache import KVCache
from monoplan.frontend.layers import (
    GELU,
    Dropout,
    Embedding,
    Identity,
    LayerNorm,
    Linear,
    PositionalEmbedding,
    ReLU,
    RMSNorm,
    RoPE,
    Sequential,
    Sigmoid,
    SiLU,
    Softmax,
    Tanh,
)
from monoplan.frontend.module import Module, ModuleList
from monoplan.frontend.parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from monoplan.frontend.parameter import Parameter, manual_seed, no_init
from monoplan.nn import functional

__all__ = [
    "GELU", "ColumnParallelLinear", "Dropout", "Embedding", "Identity", "KVCache", "LayerNorm", "Linear",
    "Module", "ModuleList", "Parameter", "PositionalEmbedding", "RMSNorm", "ReLU", "RoPE",
    "RowParallelLinear", "Sequential", "SiLU", "Sigmoid", "Softmax", "Tanh", "VocabParallelEmbedding", "functional",
    "manual_seed", "no_init",
]  # fmt: skip
