"""monoplan.nn: modules, parameters and layers, with PyTorch's names."""

from monoplan.frontend import layers as _layers
from monoplan.frontend.kv_cache import KVCache
from monoplan.frontend.layers import *  # noqa: F403
from monoplan.frontend.module import Module, ModuleList
from monoplan.frontend.parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from monoplan.frontend.parameter import Parameter, manual_seed, no_init
from monoplan.frontend.recurrent import GRU, LSTM, GRUCell, LSTMCell
from monoplan.nn import functional

__all__ = [
    "GRU", "LSTM", "ColumnParallelLinear", "GRUCell", "KVCache", "LSTMCell", "Module", "ModuleList", "Parameter",
    "RowParallelLinear", "VocabParallelEmbedding", "functional", "manual_seed", "no_init",
]  # fmt: skip
__all__ += _layers.__all__
