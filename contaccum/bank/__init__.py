"""The method, on embeddings alone: the banks, the loss over them, drift and centring.

Read `info_nce` first: it is the pipeline. No module here encodes a text.
"""
