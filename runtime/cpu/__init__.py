"""Running a plan on the CPU: weights, arguments, the call."""
