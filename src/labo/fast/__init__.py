"""The fast backends: the sums of rows and their gradient, in blocks, in C and in Triton."""
