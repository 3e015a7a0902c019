"""The method, on embeddings alone: banks, the loss over them, drift compensation and centring.

Read `info_nce` first: it explains the terms, and computes a micro-step from top to bottom. It uses
`logits` (pairs, scores and masks, by the `ids` of texts), `memory_bank` (the ring buffer and its
log-sums), `row_losses` (with their gradients), `drift` (corrections of old entries), `centering`
(of gradients) and `update_clock`. `diagnostics` describes a micro-step. `full_softmax` is a loss of
its own, for query-side training. No module here encodes a text.
"""
