"""The benchmark's weights as an OpenVINO model: the plain torch LLaMA through OpenVINO's own converter.

The result is what its users get from the usual export: keys and values are state inside of the model, 16-bit weights
are stored as f16 under an f32 graph, and the precision of the arithmetic is chosen when it is compiled. For a low-bit
format the weights are others, in the nearest format that its compressor has: times can be compared, tokens can't.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

from cpu_peers.workload import COMPRESSIONS, Workload, write_files


def write_openvino(work: Workload) -> None:
    """Converts the checkpoint, unless it was done before."""
    if work.openvino.exists():
        return
    import openvino
    import torch
    from openvino._offline_transformations import apply_make_stateful_transformation

    from cpu_peers.torch_llama import Growing, load

    source = Workload(work.model, "f32", work.folder) if work.dtype in COMPRESSIONS else work
    write_files(source)
    shape = work.shape
    group = shape["num_attention_heads"] // shape["num_key_value_heads"]
    layers, sizes = shape["num_hidden_layers"], (shape["num_key_value_heads"], shape["head_dim"])

    class Exported(torch.nn.Module):  # type: ignore[misc]
        """ids [batch, seq], mask [batch, past + seq], positions, and the keys and values of the past."""

        def __init__(self) -> None:
            super().__init__()
            # Separate products, which its CPU plugin joins in its own way.
            self.model = load(source.checkpoint, shape, torch.float32, joined=False)

        def forward(
            self, input_ids: Any, attention_mask: Any, position_ids: Any, beam_idx: Any, *past: Any
        ) -> tuple[Any, ...]:
            slots = attention_mask.cumsum(-1) - 1
            hidden = slots[:, None, None] > position_ids[:, None, :, None]
            mask = torch.zeros_like(hidden, dtype=torch.float32).masked_fill(hidden, torch.finfo(torch.float32).min)
            cache = Growing(tuple(p.index_select(0, beam_idx) for p in past), mask, group)
            logits = self.model(input_ids, position_ids[0], cache)
            return (logits, *cache.present)

    example = (
        torch.zeros(1, 4, dtype=torch.long),
        torch.ones(1, 7, dtype=torch.long),
        torch.arange(3, 7)[None],
        torch.zeros(1, dtype=torch.int32),
        *(torch.zeros(1, sizes[0], 3, sizes[1]) for _ in range(2 * layers)),
    )
    with torch.no_grad():
        model = openvino.convert_model(Exported().eval(), example_input=example)
    past = [f"past.{i // 2}.{'kv'[i % 2]}" for i in range(2 * layers)]
    names = ["input_ids", "attention_mask", "position_ids", "beam_idx", *past]
    for port, name in zip(model.inputs, names, strict=True):
        port.get_tensor().set_names({name})
    for port, name in zip(model.outputs, ["logits", *("present" + n[4:] for n in past)], strict=True):
        port.get_tensor().set_names({name})
    for port, name in zip(model.inputs, names, strict=True):
        fixed = [-1] if name == "beam_idx" else [-1, sizes[0], -1, sizes[1]] if name in past else [-1, -1]
        port.get_node().set_partial_shape(openvino.PartialShape(fixed))
    model.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(model, {name: "present" + name[4:] for name in past})
    _start_empty(model)
    if work.dtype in COMPRESSIONS:
        model = _compressed(model, *COMPRESSIONS[work.dtype])
    folder = work.openvino.parent
    half_done = folder.with_name(folder.name + ".part")
    half_done.mkdir(parents=True, exist_ok=True)
    openvino.save_model(model, half_done / work.openvino.name, compress_to_fp16=work.dtype == "bf16")
    shutil.copy(source.checkpoint / "config.json", half_done)  # GenAI reads it
    os.rename(half_done, folder)


def _compressed(model: Any, mode: str, group: int) -> Any:
    """The model with all matrices in a low-bit format, the embedding and the last one as well."""
    import nncf

    low = {} if mode.startswith("INT8") else {"group_size": group, "ratio": 1.0, "all_layers": True}
    return nncf.compress_weights(model, mode=nncf.CompressWeightsMode[mode], **low)


def _start_empty(model: Any) -> None:
    """Gives every state a first value, [batch, heads, 0, size]: without it the CPU plugin does not fuse attention."""
    import numpy as np
    from openvino import opset13 as ops

    def constant(values: list[int]) -> Any:
        return ops.constant(np.array(values, np.int64))

    batch = ops.gather(ops.shape_of(model.input("input_ids")), constant([0]), constant([0]))
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":
            _, heads, _, size = (d.min_length for d in node.get_output_partial_shape(0))
            shape = ops.concat([batch, constant([heads, 0, size])], axis=0)
            node.set_arguments([ops.broadcast(ops.constant(0.0, node.get_output_element_type(0)), shape)])
    model.validate_nodes_and_infer_types()
