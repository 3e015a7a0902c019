"""The method, on embeddings alone: the banks, the loss over them, drift and centring.

Read `info_nce` first: it is the pipeline. It uses `logits` (scores and masks), `memory_bank` (the
ring buffer and its log-sums), `row_losses`, `compensation` (drift), `centering` and `update_clock`.
No module here encodes a text.
"""
