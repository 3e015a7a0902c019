"""Choice of a model between a base model and the model that was trained from it, by their scores.

`scoring` computes nDCG@10 of the interpolated models, `choice` chooses one of them, and `output`
writes it. The models are scored on own data, which are like the training data, and on guard data,
which are other data on which the base model's quality must not get lost.
"""
