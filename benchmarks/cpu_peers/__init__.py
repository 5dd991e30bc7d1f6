"""The parts of `cpu_llama.py`: one module per peer, the workers that run them, and what is said about the times."""
