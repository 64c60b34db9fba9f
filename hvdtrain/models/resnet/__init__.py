"""Residual networks, for 32 x 32 images and for ImageNet."""
