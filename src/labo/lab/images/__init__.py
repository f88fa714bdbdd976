"""Image classification: data, augmentation, networks, scores and the task."""
