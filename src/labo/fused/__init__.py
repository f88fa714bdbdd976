"""The fast layers: losses on logits in one pass, and output layer + loss without the logits."""
