"""Trained models as files for other programs: formats, quantization, and the check of each file in its own runtime."""
