"""Asynchronous training: workers push gradients to servers, which hold the parameters, at a pace of their own."""
