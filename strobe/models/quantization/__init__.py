"""How checkpoints and linear layers store quantized weights, one module for each method.

A method is an entry of `methods.METHODS`. It reads its part of config.json, and says which tensors
a layer's weight is made of and in which format the layer holds it (`strobe.models.linear`).
"""
