"""Values that both planes share; pure, and importable without torch or a compiled module."""
