"""The relay: lets peers in, pairs them, moves their frames, and looks into no frame beyond its type and session.

`router` decides and is pure, `fit` says which nodes can serve together, `server` performs over websockets, `client` is
the streaming client. Never imports torch.
"""
