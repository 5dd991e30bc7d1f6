"""monoplan.nn: modules, parameters and layers, with PyTorch's names."""

from monoplan.frontend import activations as _activations
from monoplan.frontend.activations import *  # noqa: F403
from monoplan.frontend.kv_cache import KVCache
from monoplan.frontend.layers import (
    Dropout,
    Embedding,
    Identity,
    LayerNorm,
    Linear,
    PositionalEmbedding,
    RMSNorm,
    RoPE,
    Sequential,
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
    ConvTranspose2d,
    Flatten,
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    MaxPool1d,
    MaxPool2d,
    Upsample,
)
from monoplan.nn import functional

__all__ = [
    "GRU", "LSTM", "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveMaxPool1d", "AdaptiveMaxPool2d", "AvgPool1d",
    "AvgPool2d", "BatchNorm1d", "BatchNorm2d", "ColumnParallelLinear", "Conv1d", "Conv2d", "ConvTranspose1d",
    "ConvTranspose2d", "Dropout", "Embedding", "Flatten", "GRUCell", "GroupNorm", "Identity", "InstanceNorm1d",
    "InstanceNorm2d", "KVCache", "LSTMCell", "LayerNorm", "Linear", "MaxPool1d", "MaxPool2d", "Module", "ModuleList",
    "Parameter", "PositionalEmbedding", "RMSNorm", "RoPE", "RowParallelLinear", "Sequential", "Upsample",
    "VocabParallelEmbedding", "functional", "manual_seed", "no_init",
]  # fmt: skip
__all__ += _activations.__all__
