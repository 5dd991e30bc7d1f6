"""PyTorch's modules as monoplan's: `mp.from_torch`, `mp.coverage` and the backend of `torch.compile`."""
