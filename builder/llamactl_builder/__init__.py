"""Builds the patched llama-server: source, patch set, compiler, default model."""
