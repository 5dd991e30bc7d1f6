"""Generation: the step as one plan, decoding settings, on the host and on the device."""
