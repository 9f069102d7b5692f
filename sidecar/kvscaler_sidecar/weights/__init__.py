"""Where a model's files come from, before any tensor is on a device.

The engine reads one layout only, a Hugging Face folder with safetensors. What arrives in another
form (the bundled GGUF) is converted to it once, when the image is built, so that a Pod starts
by mapping a file and so that every other engine and our exactness oracle read the same weights.
"""
