"""The decisions of speculative decoding, pure: no asyncio, no clock, no environment, no torch.

`tree` holds the candidates, `walk` follows the target through them, `growth` and `selection` are the replaceable
policies of the draft and the verify node, `stats` and `ledger` count. `passes` is what schedulers ask runners for.
"""
