"""Fused backends: losses on logits in one pass, and output layer and loss without the logits."""
