"""From source to a loaded library: compilers, the cache and what is known of this machine's tools."""
