"""Models on fixed addresses: checkpoints, KV cache with in-place rewind, sampler, and the thread that owns them.

`runner` names what the nodes need; `target` and `drafter` implement it over `model`, which alone knows
transformers (`hf`); `scripted` implements it without weights, for tests and simulation.
"""
