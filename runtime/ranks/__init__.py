"""Talking with other ranks: in one process, by MPI, by NCCL."""
