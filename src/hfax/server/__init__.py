"""A server that speaks the OpenAI API, over `hfax.engine`.

The way of a request: `guard` (who may ask, and how much) → `app` (routes) → `protocol` (what may be asked) → `chat` (messages to a
prompt) → the engine → `output_parser` (reasoning and tool calls out of the text) → `responses` (JSON, or a stream of it).
"""
