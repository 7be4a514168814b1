"""The kernels of the models in Triton, for CUDA."""
