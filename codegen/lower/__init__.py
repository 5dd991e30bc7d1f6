"""Graph to kernels: one file of rules for each family of ops."""
