"""A GAN of the DCGAN kind on handwritten digits, and a notebook of it that survives the loss of
its kernel.
"""
