"""The offline bench: at which prefix length reloading beats recomputing."""
