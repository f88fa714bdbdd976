"""Language modelling: documents, packing, a causal model, bits per byte, generation."""
