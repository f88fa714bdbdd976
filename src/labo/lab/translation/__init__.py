"""Translation: parallel text, subwords, models, beam search, BLEU and the task."""
