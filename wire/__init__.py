"""What crosses the wire between draft node, relay, verify node and client.

`messages` is the whole protocol on one page, `codec` turns messages into frames and back, `tensors` is the
self-describing binary frame, `connection` is the sans-IO state machine of one peer. Sockets live in `wire.aio`.
"""
