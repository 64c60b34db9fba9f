"""Residual networks for 32 x 32 images, and for those of ImageNet's size."""
