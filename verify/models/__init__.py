"""Models in torch, under the names and in the layout of GGUF: what an engine makes of a file, small and readable."""
