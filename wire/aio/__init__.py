"""The asyncio shells of the wire: websockets links, an in-memory link for tests, the trace writer."""
