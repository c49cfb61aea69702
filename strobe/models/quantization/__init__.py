"""Storage of quantized weights in checkpoints and linear layers, one module per method.

A method is an entry of `methods.METHODS`. It reads its part of config.json, maps a layer's weight
to the checkpoint's tensors, and sets the format in which the layer holds it
(`strobe.models.linear`).
"""
