"""The order of the passes, with the reason beside each."""

from __future__ import annotations

from monoplan.passes.canonicalize import DCE, HOIST_SETUP, MERGE_EQUAL_OPS, REMOVE_IDENTITIES
from monoplan.passes.fold_conv import FOLD_CONV
from monoplan.passes.fuse_attention import FUSE_ATTENTION
from monoplan.passes.fuse_latent import FUSE_LATENT
from monoplan.passes.fuse_linear import (
    FUSE_HEAD_ARGMAX,
    FUSE_LINEAR_NORM,
    FUSE_NORM_LINEAR,
    FUSE_RESIDUAL_ADD,
    MERGE_PARALLEL_LINEARS,
)
from monoplan.passes.fuse_norm_experts import FUSE_NORM_EXPERTS
from monoplan.passes.fuse_pointwise import FUSE_GATED, FUSE_INTO_PRODUCER, FUSE_INTO_REDUCE, FUSE_POINTWISE
from monoplan.passes.fuse_qkv import FUSE_QKV
from monoplan.passes.fuse_route import FUSE_ROUTE
from monoplan.passes.hoist_from_scans import HOIST_FROM_SCANS
from monoplan.passes.idioms import IDIOMS, LINEAR_BIAS
from monoplan.passes.manager import Pass
from monoplan.passes.pull_last_token import PULL_LAST_TOKEN
from monoplan.passes.roll_layers import ROLL_LAYERS
from monoplan.passes.sink_reshapes import SINK_RESHAPES
from monoplan.passes.widen_activations import WIDEN_ACTIVATIONS

PIPELINE: tuple[Pass, ...] = (
    DCE,
    REMOVE_IDENTITIES,  # first: patterns need not know of views that do nothing
    WIDEN_ACTIVATIONS,  # before fusion: casts it inserts are fused like any pointwise op
    IDIOMS,  # hand-written silu, norms and repeats become the ops that fusions look for
    HOIST_SETUP,  # transposed weights and the like leave the plan
    FOLD_CONV,  # after hoisting: scale and shift of a batch_norm are weights now
    HOIST_SETUP,  # and so are the weights that it makes
    MERGE_EQUAL_OPS,
    HOIST_FROM_SCANS,  # products are plain linears now; in the loop only those are left that read the state
    SINK_RESHAPES,  # after the idioms: a product by a weight is a linear now
    PULL_LAST_TOKEN,  # before norms fuse into the head, so that it sees a plain norm and linear
    FUSE_ATTENTION,
    REMOVE_IDENTITIES,  # attention leaves pairs of transposes behind, sinking pairs of reshapes
    LINEAR_BIAS.as_pass(),  # once more: sinking brings linears and biases together
    MERGE_PARALLEL_LINEARS,  # before norm + linear: leaves each norm with one reader
    FUSE_NORM_EXPERTS,  # before norm + linear: the router gets a norm of its own
    FUSE_NORM_LINEAR,
    FUSE_QKV,  # after the merge and the norm: takes the whole product
    FUSE_LATENT,  # beside it: latent attention has no q, k and v of one product
    FUSE_POINTWISE,  # chains first, so that a tail moves into its kernel whole
    FUSE_GATED,  # before plain tails: needs both halves
    FUSE_RESIDUAL_ADD.as_pass(),
    FUSE_INTO_PRODUCER,
    FUSE_LINEAR_NORM,  # behind norm + linear and the tails: takes what has neither, and a norm with its residual
    FUSE_INTO_REDUCE,
    FUSE_HEAD_ARGMAX,
    FUSE_ROUTE,  # behind gates and norms: takes a gated product whole, with its norm
    DCE,
    ROLL_LAYERS,  # last: layers must have their final form to be equal
)
# One kernel per op, for comparison; half precision is still widened, so that both plans round alike.
UNFUSED: tuple[Pass, ...] = (DCE, REMOVE_IDENTITIES, WIDEN_ACTIVATIONS, HOIST_SETUP)
OURS = (*PIPELINE, *UNFUSED)  # stays as it is where somebody puts other passes in place of them
