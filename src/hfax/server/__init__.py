"""An OpenAI-compatible server on top of `hfax.engine`.

Request path: `guard` (access control and size limits) → `app` (routes) → `protocol` (request schemas) → `chat` (messages to a
prompt) → the engine → `output_parser` (extracts reasoning and tool calls) → `responses` (JSON, or a stream of JSON events).
"""
