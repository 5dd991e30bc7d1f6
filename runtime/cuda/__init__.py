"""Running a plan on a GPU: the device, weights, launches, graphs, tuning."""
