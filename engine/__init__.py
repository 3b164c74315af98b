"""Models on fixed addresses: checkpoints, KV cache with in-place rewind, sampler, and the thread that owns them.

`runner` names what the nodes need; `target` and `drafter` implement it over `model`, which alone knows
transformers (`hf`); `scripted` implements it without weights, for tests and simulation.
"""

import os

# A CPU's matrix products are compiled and kept for each shape, and candidates come in all numbers of rows: the 1,024
# shapes that PyTorch and oneDNN keep by default came to 330 MB at a draft node; 256, enough for 32 rows, come to 140.
for _name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "256")
