"""What this machine is: CPU, instruction sets that work, threads, measured limits."""
