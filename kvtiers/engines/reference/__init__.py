"""The reference engine: a small transformer with paged KV that drives kvtiers by itself."""
