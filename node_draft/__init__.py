"""The draft node: token ids in, tree nodes out.

`scheduler` decides and is pure, `node` performs over the link and the model's thread, `config` is read once.
"""
