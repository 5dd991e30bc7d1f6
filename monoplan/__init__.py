"""monoplan: a Module becomes one compiled plan, and every step is readable."""
