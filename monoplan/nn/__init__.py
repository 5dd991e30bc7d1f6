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
from monoplan.frontend.recurrent import GRU, LSTM, GRUCell, LSTMCell
from monoplan.frontend.window_layers import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveMaxPool1d,
    AdaptiveMaxPool2d,
    AvgPool1d,
    AvgPool2d,
    BatchNorm1d,
    BatchNorm2d,
    Conv1d,
    Conv2d,
    ConvTranspose1d,
    Flatten,
    MaxPool1d,
    MaxPool2d,
    Upsample,
)
from monoplan.nn import functional

__all__ = [
    "GELU", "GRU", "LSTM", "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveMaxPool1d", "AdaptiveMaxPool2d",
    "AvgPool1d", "AvgPool2d", "BatchNorm1d", "BatchNorm2d", "ColumnParallelLinear", "Conv1d", "Conv2d",
    "ConvTranspose1d", "Dropout", "Embedding", "Flatten", "GRUCell", "Identity", "KVCache", "LSTMCell", "LayerNorm",
    "Linear", "MaxPool1d", "MaxPool2d", "Module", "ModuleList", "Parameter", "PositionalEmbedding", "RMSNorm", "ReLU",
    "RoPE", "RowParallelLinear", "Sequential", "SiLU", "Sigmoid", "Softmax", "Tanh", "Upsample",
    "VocabParallelEmbedding", "functional", "manual_seed", "no_init",
]  # fmt: skip
