"""The language: types, ops, graphs, their text, the verifier and the reference interpreter."""
