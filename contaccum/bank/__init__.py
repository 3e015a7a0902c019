"""The method, on embeddings alone: banks, the loss over them, drift compensation and centring.

Read `info_nce` first: it computes a micro-step from top to bottom. It uses `logits` (scores and
masks), `false_negatives` (the rules behind the masks), `memory_bank` (the ring buffer and its
log-sums), `row_losses`, `drift` and `compensation`, `centering` and `update_clock`. No module here
encodes a text.
"""
