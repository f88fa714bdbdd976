"""Hugging Face: the losses of labo in a ``Trainer``, and language models that store no logits.

The entry points:

- :func:`regularize` gives a loss to a ``Trainer``, ``Seq2SeqTrainer`` or TRL ``SFTTrainer``, with
  its warm-up, its checkpoints and, if wanted, a teacher.
- :func:`compute_loss_func` makes a loss the ``compute_loss_func`` of a ``Trainer``.
- :func:`fuse_head` gives a loss to a causal or encoder-decoder model: output layer and loss become
  one :func:`labo.linear_loss`, in a ``Trainer`` or in any other training loop.
  ``regularize(trainer, loss)`` counts the steps of its warm-up in a ``Trainer`` and logs the
  metrics of the model; :func:`take_metrics` returns them elsewhere.
- :class:`StoredTeacherDataset` and :class:`StoredTeacherCollator` read what ``labo teacher``
  stored.

All follow the same rules:

- The loss is the sum over the targets of a micro-batch divided by the number of targets in the
  whole batch (``num_items_in_batch``). Gradient accumulation and data parallelism do not change it.
- While gradients are enabled the loss is the one that was given. Under ``torch.no_grad()`` or
  ``torch.inference_mode()`` it is the plain negative log-likelihood. ``model.train()`` and
  ``model.eval()`` make no difference to the choice.
- Labels are shifted once for causal models, and not at all for encoder-decoders and classifiers.
- The router losses of a mixture of experts are added to the training loss.
- What cannot be done correctly raises an error with the reason.
"""

from .callback import RegularizationCallback
from .head import fuse_head, take_metrics, unfuse_head
from .stored import StoredTeacherCollator, StoredTeacherDataset
from .trainer import compute_loss_func, regularize

__all__ = [
    "RegularizationCallback",
    "StoredTeacherCollator",
    "StoredTeacherDataset",
    "compute_loss_func",
    "fuse_head",
    "regularize",
    "take_metrics",
    "unfuse_head",
]
