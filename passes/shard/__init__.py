"""Dividing a graph among ranks: the rewrite, the rules of each op, and how weights are split."""
