"""The verify node: it owns the truth.

`scheduler` decides and is pure, `requests` and `text` hold what a request may ask and how an answer is shown,
`node` performs over the link and the model's thread, `config` is read once.
"""
